"""Random conversations: any text, tool calls, tool results, and literal markers that must stay plain text."""

import json

from hypothesis import strategies as st

MARKERS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<tool_call>", "</tool_call>", "<think>", "</think>")

plain = st.text(st.characters(exclude_categories=["Cs"]), max_size=40).map(
    lambda text: text if not any(marker in text for marker in MARKERS) else "x"
)
spiked = st.lists(st.one_of(plain, st.sampled_from(MARKERS)), max_size=4).map("".join)
names = st.text("abcdefgh_", min_size=1, max_size=8)
arguments = st.dictionaries(names, st.one_of(plain, st.integers(-9, 9), st.booleans(), st.none()), max_size=3)
tools = st.lists(
    st.builds(
        lambda name, about: {
            "type": "function",
            "function": {"name": name, "description": about, "parameters": {"type": "object", "properties": {}}},
        },
        names,
        plain,
    ),
    max_size=2,
)


def calls(text=arguments):
    return st.lists(
        st.builds(
            lambda name, values, as_text: {
                "id": "call_1",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(values, ensure_ascii=False) if as_text else values},
            },
            names,
            text,
            st.booleans(),
        ),
        max_size=2,
    )


def replies(text):
    """Messages that may follow an assistant's turn."""
    user = st.builds(lambda content: [{"role": "user", "content": content}], text)
    results = st.lists(
        st.builds(lambda content: {"role": "tool", "content": content, "tool_call_id": "call_1"}, text),
        min_size=1,
        max_size=3,
    )
    return st.one_of(user, results)


def assistant(text):
    return st.builds(
        lambda content, reasoning, tool_calls: {
            "role": "assistant",
            "content": content,
            **({"reasoning_content": reasoning} if reasoning else {}),
            **({"tool_calls": tool_calls} if tool_calls else {}),
        },
        text,
        text,
        calls(),
    )


def conversations(text=plain):
    """A history that does not end with the assistant."""
    start = st.builds(
        lambda system, user: [
            *([{"role": "system", "content": system}] if system is not None else []),
            {"role": "user", "content": user},
        ],
        st.one_of(st.none(), text),
        text,
    )
    later_turns = st.lists(st.tuples(assistant(text), replies(text)), max_size=3)
    return st.builds(lambda head, turns: head + [m for turn, new in turns for m in (turn, *new)], start, later_turns)
