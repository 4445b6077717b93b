"""The weight version of each sampled token: a part of a completion gets a version per token, or is untrainable.

An engine can be replaced unnoticed: its process is restarted between two health checks, or its URL leads to another
process. So the versions in a reply are compared with the version that the engine was given, and a reply without
versions is trusted only while the same process is known to answer.

    a reply has versions        Each must be one that the engine had since the call started (`EngineCall.versions`).
                                Otherwise the engine is quarantined, and the part is untrainable.
    the engine was given none   It may report any version, but not a lower one than before, and not none after one.
    a reply has no version      Trusted while `http.Contact` shows the same process as when the engine was last
                                verified. After that, the engine is verified again: by its version, otherwise by the
                                time at which its process started. If it reports neither, a lost connection makes its
                                tokens untrainable until a resume names a version.

A policy whose version was never set has version 0, whatever its engines serve. Only an engine that contradicts its own
earlier replies is quarantined there.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from rollyard.core.failure import EngineFailure
from rollyard.engines.base import Contact, Generation, VersionSpan
from rollyard.engines.pool.pool import EngineCall, Health, PoolMember

ASK_S = 10.0
"""How long an engine may take to report its version and the start of its process."""


class OtherWeights(Exception):
    """The engine does not have the version that it was given."""


class UnknownWeights(Exception):
    """The engine reports nothing that shows which version it has."""


async def with_versions(
    member: PoolMember, call: EngineCall, part: Generation, first_contact: Contact | None
) -> Generation:
    """The part with a version for each token, or −1 and a reason why it is untrainable.

    `first_contact` is the contact when the first tokens of a stream arrived; None: the call was not streamed."""
    if not part.token_ids:
        return part
    if part.versions:
        wrong = next((span.version for span in part.versions if not _is_allowed(member, call, span.version)), None)
        if wrong is None:
            if first_contact in (None, call.contact) and call.contact == member.engine.contact:
                member.verified = call.contact
            return stamped(part, call.version)
        reason = _other(member, "no version" if wrong < 0 else f"version {wrong}")
        _quarantine(member, reason)
        return replace(stamped(part, -1), untrainable=reason)
    last_contact = member.engine.contact if first_contact is None else first_contact
    if not member.pool.is_named or _is_same_process(member, call.contact, last_contact):
        return stamped(part, call.version)
    reason = await verify(member)
    return replace(stamped(part, -1 if reason else call.version), untrainable=reason)


def stamped(part: Generation, version: int) -> Generation:
    """The part, with this version for each token that has none."""
    spans = part.versions or (VersionSpan(-1, 0, len(part.token_ids)),)
    known = tuple(VersionSpan(version if span.version < 0 else span.version, span.start, span.end) for span in spans)
    return replace(part, versions=known)


async def remember(member: PoolMember) -> None:
    """Records the process that has the member's version now."""
    member.started = await member.engine.started()
    member.verified = member.engine.contact


async def verify(member: PoolMember) -> str:
    """Why the engine may not have its version; empty if it has. Quarantines it if it reports another one."""
    try:
        async with asyncio.timeout(ASK_S):
            await compare(member)
    except OtherWeights as error:
        _quarantine(member, str(error))
        return str(error)
    except UnknownWeights as error:
        return str(error)
    except (EngineFailure, TimeoutError):
        return f"engine {member.id} was lost, and cannot report which weights it had"
    return ""


async def compare(member: PoolMember) -> None:
    """Returns if the engine still has its version. Raises OtherWeights, UnknownWeights or EngineFailure."""
    losses = member.engine.contact.losses
    reported, started = await member.engine.control.version(), await member.engine.started()
    if reported is not None and member.is_version_accepted:
        if reported != str(member.version):
            raise OtherWeights(_other(member, f"version {reported!r}"))
    elif started is None or member.started is None:
        raise UnknownWeights(
            f"engine {member.id} was unreachable, and does not report which weights it has: its tokens are trainable"
            " again after a resume that names a version"
        )
    elif started != member.started:
        raise OtherWeights(f"engine {member.id} was restarted: its weights may not be version {member.version}")
    if losses == member.engine.contact.losses:
        member.started, member.verified = started, member.engine.contact


def _is_same_process(member: PoolMember, *contacts: Contact) -> bool:
    """Whether the process that was last verified answered in all these contacts. For an engine that cannot be verified
    again, connections that this side closed do not count."""
    last = member.verified
    if last is None or member.started is not None or member.is_version_accepted:
        return all(contact == last for contact in contacts)
    return all(contact.losses == last.losses for contact in contacts)


def _is_allowed(member: PoolMember, call: EngineCall, version: int) -> bool:
    if version < 0:
        return not call.is_version_accepted and call.reported_version < 0
    if call.is_version_accepted or member.is_version_accepted:
        return version in call.versions
    return version >= call.reported_version


def _other(member: PoolMember, reported: str) -> str:
    return f"engine {member.id} reports {reported} where it had version {member.version}: was it restarted?"


def _quarantine(member: PoolMember, why: str) -> None:
    """No call starts there until a resume names a version; calls in flight are cut."""
    member.verified = None
    if member.health is not Health.QUARANTINED:
        member.quarantine(why)
        member.cut(is_sparing=False)
