"""TLS of the service's port: with certificates that the operator gives, or with one of its own, made once.

One of its own is signed by nobody: its digest is part of the URL that the service announces, and whoever is given that
URL (nodes, clients) accepts this certificate and no other (`core/address.py`).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

from rollyard.service.settings import Settings, SettingsError

FOLDER = "tls"  # below data_dir
OWN_DAYS = 3650
MAKE_S = 30.0


@dataclass(frozen=True, slots=True)
class Tls:
    """What the server needs, and the digest of a certificate that only a pin makes trustworthy."""

    context: ssl.SSLContext
    pin: bytes | None


def open_tls(settings: Settings) -> Tls | None:
    """None: plain HTTP. `SettingsError` if the files cannot be used."""
    if settings.tls_cert is not None and settings.tls_key is not None:
        return Tls(_context(settings.tls_cert, settings.tls_key), None)
    if settings.tls != "own":
        return None
    folder = settings.data_dir / FOLDER
    cert, key = folder / "cert.pem", folder / "key.pem"
    if not (cert.is_file() and key.is_file()):
        _make(folder, cert, key)
    return Tls(_context(cert, key), digest_of(cert))


def digest_of(cert: Path) -> bytes:
    """SHA-256 of the first certificate in the file, in DER: what a URL's pin says."""
    text = cert.read_text()
    end = "-----END CERTIFICATE-----"
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(text[: text.index(end) + len(end)])).digest()


def _context(cert: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise SettingsError(f"the certificate {cert} with the key {key} cannot be used: {error}") from error
    return context


def _make(folder: Path, cert: Path, key: Path) -> None:
    """The key first, readable by us alone; the certificate appears when both are complete."""
    if shutil.which("openssl") is None:
        raise SettingsError("tls = own needs the program openssl; install it, or give tls_cert and tls_key")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = folder / f".cert.{os.getpid()}"
    subject = ["-subj", "/CN=rollyard", "-days", str(OWN_DAYS)]
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    mask = os.umask(0o077)
    try:
        made = subprocess.run(
            ["openssl", "req", "-x509", *curve, *subject, "-keyout", str(key), "-out", str(draft)],
            capture_output=True,
            text=True,
            timeout=MAKE_S,
            stdin=subprocess.DEVNULL,
        )
    finally:
        os.umask(mask)
    if made.returncode != 0:
        raise SettingsError(f"openssl could not make a certificate: {made.stderr.strip()[-300:]}")
    draft.replace(cert)
