"""Which weights sampled a token: each part of a completion gets a version for every token, or a reason to doubt it.

An engine may be another one without our noticing: its process was started again between two looks at its health, or
another process answers behind its URL. So what it says of its weights is compared with what it was given, in each
reply; and what does not say it is believed only as long as the same process is known to answer.

    it names versions               each must be one that it had since the call began (`Call.versions`). Else it is
                                    quarantined, and the part is doubtful.
    it was never given a version    it may name what it likes, but not go back: neither to a lower one, nor to none.
    it names none                   believed if its connections show that the process is the one that was given this
                                    version (`http.Contact`); else it is asked for its version, or for the time at which
                                    its process began. One that can say neither is believed until a connection was lost,
                                    and from then on its tokens are doubtful.

A policy whose weights nobody ever named has version 0 for whatever its engines serve: nothing can be wrong there
unless an engine contradicts itself.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from rollyard.core.failure import EngineFailure
from rollyard.engines.base import Generation, VersionSpan
from rollyard.engines.http import Contact
from rollyard.engines.pool import Call, Health, Member

log = logging.getLogger("rollyard.engines")

ASK_S = 10.0
"""For an engine to say which version it has, or when it was started."""


async def vouched(member: Member, call: Call, part: Generation, first_contact: Contact | None) -> Generation:
    """The part with a version for each of its tokens, and with a doubt if there is one. `first_contact` is the contact
    in which the first tokens of a stream came; None: it was not streamed."""
    if not part.token_ids:
        return part
    if part.versions:
        wrong = next((span.version for span in part.versions if not _is_allowed(member, call, span.version)), None)
        if wrong is None:
            if first_contact in (None, call.contact) and call.contact == member.engine.contact:
                member.vouched = call.contact
            return stamped(part, call.version)
        doubt = contradiction(member, "no version" if wrong < 0 else f"version {wrong}")
        distrust(member, doubt)
        return replace(stamped(part, -1), doubt=doubt)
    seen = member.engine.contact if first_contact is None else first_contact
    if not member.pool.is_named or _is_same(member, call.contact, seen):
        return stamped(part, call.version)
    doubt = await doubt_of(member)
    return replace(stamped(part, call.version if not doubt else -1), doubt=doubt)


def _is_same(member: Member, *contacts: Contact) -> bool:
    """Whether it is the process that was last known to have its version, in all these moments."""
    then = member.vouched
    if then is None or member.started is not None or member.given_version is not None:
        return all(contact == then for contact in contacts)
    return all(contact.losses == then.losses for contact in contacts)


def _is_allowed(member: Member, call: Call, version: int) -> bool:
    if version < 0:
        return not call.is_told and call.said_version < 0
    if call.is_told or member.given_version is not None:
        return version in call.versions
    return version >= call.said_version


def stamped(part: Generation, version: int) -> Generation:
    """The part with a version for each of its tokens: those that it does not name have this one."""
    count = len(part.token_ids)
    spans = part.versions or (VersionSpan(-1, 0, count),)
    return replace(
        part, versions=tuple(VersionSpan(s.version if s.version >= 0 else version, s.start, s.end) for s in spans)
    )


# --- asking the engine


async def remember(member: Member) -> None:
    """Its weights are known now: so is the process that has them."""
    member.started = await member.engine.started()
    member.vouched = member.engine.contact


async def doubt_of(member: Member) -> str:
    """Why its weights are not known to be what they should; empty: they are. One that contradicts is quarantined."""
    contact = member.engine.contact
    try:
        async with asyncio.timeout(ASK_S):
            said = await member.engine.control.version()
            started = await member.engine.started()
    except (EngineFailure, TimeoutError):
        return f"engine {member.id} was lost, and cannot say which weights it had"
    given = member.given_version
    if said is not None and given is not None:
        if said != str(given):
            doubt = contradiction(member, f"version {said!r}")
            distrust(member, doubt)
            return doubt
    elif started is None or member.started is None:
        return (
            f"engine {member.id} was out of reach, and cannot say which weights it has: a resume that names a version"
            " makes its tokens trainable again"
        )
    elif started != member.started:
        doubt = f"engine {member.id} was started again: its weights are not version {member.version}"
        distrust(member, doubt)
        return doubt
    if contact.losses == member.engine.contact.losses:
        member.vouched = member.engine.contact
    return ""


def contradiction(member: Member, said: str) -> str:
    return f"engine {member.id} says {said} where it had version {member.version}: was it started again?"


def distrust(member: Member, why: str) -> None:
    """Nothing more is sampled there until a resume names a version. What it has in flight is cut."""
    member.vouched = None
    if member.health is not Health.QUARANTINED:
        member.quarantine(why)
        member.cut(is_sparing=False)
