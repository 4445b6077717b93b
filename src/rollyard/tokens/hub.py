"""Downloads a tokenizer from the Hugging Face hub, into the hub's own cache on this machine.

The hub's client runs in a process of its own: it can be ended at a deadline, and it reads HF_HOME, HF_TOKEN,
HF_ENDPOINT and HF_HUB_OFFLINE as every other program does. Only the files of a tokenizer are fetched; the client
verifies them against the hub's digests.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from rollyard.tokens.tokenizer import TOKENIZER_FILES

DOWNLOAD_S = 25.0
"""Time limit of a download, which has some 35 MB at most. An engine's probe, which has 60 s, may need two downloads; a
later probe continues an unfinished one."""

_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_PROGRAM = """
import json, sys
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
try:
    print(json.dumps({"folder": snapshot_download(sys.argv[1], allow_patterns=sys.argv[2:])}))
except Exception as error:
    is_wrapped = isinstance(error, LocalEntryNotFoundError) and error.__cause__ is not None
    cause = error.__cause__ if is_wrapped else error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    print(json.dumps({"error": f"{type(cause).__name__}: {lines[0] if lines else 'no reason given'}"}))
"""


class DownloadFailed(Exception):
    """The hub did not deliver the tokenizer; the text is the reason."""


async def download_tokenizer(name: str) -> Path:
    """Fetches the newest revision. Returns its folder in the hub's cache, which is named by the revision. Raises
    DownloadFailed."""
    if any(os.environ.get(variable, "").upper() in ("1", "ON", "YES", "TRUE") for variable in _OFFLINE):
        raise DownloadFailed("offline mode is set (HF_HUB_OFFLINE)")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _PROGRAM, name, *TOKENIZER_FILES),
        env={**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(DOWNLOAD_S):
            stdout, stderr = await process.communicate()
    except TimeoutError:
        raise DownloadFailed(f"not finished within {DOWNLOAD_S:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    try:
        reply = json.loads(stdout)
    except ValueError:
        lines = stderr.decode("utf-8", "replace").strip().splitlines() or [f"exit status {process.returncode}"]
        raise DownloadFailed(lines[-1]) from None
    if "error" in reply:
        raise DownloadFailed(reply["error"])
    return Path(reply["folder"])
