"""Shows a trace token by token: what was given as text, and each sampled token with its logprob.

Long traces are folded: of a turn the first and last tokens, of the turns the first and last ones. A turn that is
requested by its number is shown whole. The texts come from the service, which has the tokenizer; without them, the ids
are shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.text import Text

from rollyard.cli._console import number, visible

if TYPE_CHECKING:
    from rich.console import Console

    from rollyard.client import Trace
    from rollyard.core import Span

SHOWN_LINES = 6
SHOWN_CHARS = 300
FIRST_TOKENS, LAST_TOKENS = 200, 40
FIRST_TURNS, LAST_TURNS = 12, 4

COLOURS = ((-0.05, "green"), (-0.7, "yellow"), (float("-inf"), "red"))
"""By logprob: nearly certain, more likely than not (0.5), less likely."""

Message = Mapping[str, Any]


def some(count: int, what: str) -> str:
    return f"{number(count)} {what}" + ("" if count == 1 else "s")


def counts(trace: Trace) -> str:
    """Returns how many of its tokens were given and sampled."""
    sampled = int((trace.mask == 1).sum())
    turns = some(len(_turns(trace)), "turn")
    return f"{some(len(trace), 'token')}: {number(len(trace) - sampled)} given, {number(sampled)} sampled in {turns}"


def legend() -> Text:
    text = Text("Sampled tokens, each with its logprob. Coloured:")
    for (_, colour), words in zip(COLOURS, ("nearly certain", "more likely than not", "less likely"), strict=True):
        text.append("  ").append(words, colour)
    return text


def show_trace(
    console: Console,
    trace: Trace,
    texts: Sequence[str] | None,
    messages: Sequence[Message] = (),
    *,
    only_turn: int | None = None,
) -> None:
    """Prints the turns of a trace. `messages` are those of its rollout: they replace the given tokens if there is one
    message of the model for each turn."""
    turns = _turns(trace)
    answers = list(_answers(messages))
    is_aligned = len(answers) == len(turns) + 1
    end = 0
    for index, span in enumerate(turns):
        given, end = range(end, span.start), span.end
        if only_turn is not None and index + 1 != only_turn:
            continue
        if only_turn is None and index == FIRST_TURNS and len(turns) > FIRST_TURNS + LAST_TURNS:
            left_out = f"{index + 1} to {len(turns) - LAST_TURNS}"
            console.print(Text(f"\n… turns {left_out} are left out; --turn N shows one of them", "dim"))
        if only_turn is None and FIRST_TURNS <= index < len(turns) - LAST_TURNS:
            continue
        if is_aligned:
            for message in answers[index]:
                show_message(console, message)
        elif given:
            _show_given(console, given, texts)
        heading = Text.assemble(f"\nturn {index + 1}", (f" tokens {span.start} to {span.end - 1}", "dim"))
        heading.stylize("bold", 0, len(f"\nturn {index + 1}"))
        console.print(heading)
        console.print(_tokens(trace, texts, range(span.start, span.end), is_whole=only_turn is not None))
    if only_turn is None and is_aligned:
        for message in answers[-1]:
            show_message(console, message)
    elif only_turn is None and end < len(trace):
        _show_given(console, range(end, len(trace)), texts)


def show_message(console: Console, message: Message) -> None:
    if message.get("role") != "system":
        _show_text(console, str(message.get("name") or message.get("role")), str(message.get("content") or ""))


def turn_count(trace: Trace) -> int:
    return len(_turns(trace))


def _turns(trace: Trace) -> list[Span]:
    return [span for span in trace.spans if span.is_owned]


def _answers(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Yields the messages before the first one of the model, then those that follow each of them."""
    group: list[Message] = []
    for message in messages:
        if message.get("role") == "assistant":
            yield group
            group = []
        else:
            group.append(message)
    yield group


def _show_given(console: Console, places: range, texts: Sequence[str] | None) -> None:
    text = "" if texts is None else "".join(texts[place] for place in places)
    _show_text(console, "given", text or f"({some(len(places), 'token')})")


def _show_text(console: Console, name: str, text: str) -> None:
    text = visible(text.strip())
    lines = text[:SHOWN_CHARS].splitlines()[:SHOWN_LINES] or ["(nothing)"]
    if len("\n".join(lines)) < len(text):
        lines.append("…")
    for line in lines:
        console.print(Text.assemble((f"{visible(name):>8} │ ", "dim"), line))


def _tokens(trace: Trace, texts: Sequence[str] | None, places: range, *, is_whole: bool) -> Text:
    text = Text()
    is_folded = not is_whole and len(places) > FIRST_TOKENS + LAST_TOKENS
    for place in places[:FIRST_TOKENS] if is_folded else places:
        _append(text, trace, texts, place)
    if is_folded:
        text.append(f"… {some(len(places) - FIRST_TOKENS - LAST_TOKENS, 'token')} … ", "dim")
        for place in places[-LAST_TOKENS:]:
            _append(text, trace, texts, place)
    return text


def _append(text: Text, trace: Trace, texts: Sequence[str] | None, place: int) -> None:
    shown = str(trace.token_ids[place]) if texts is None else _visible(texts[place])
    if trace.logprobs is None:
        text.append(f"{shown} ")
        return
    logprob = float(trace.logprobs[place])
    text.append(shown, next((colour for least, colour in COLOURS if logprob >= least), "red"))
    rounded = logprob if logprob <= -0.005 else 0.0  # not −0.00
    text.append(f"({rounded:.2f})", "dim")  # no space before it, so that it stays on its token's line
    text.append(" ")


def _visible(text: str) -> str:
    return visible(text.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "·")) or "∅"
