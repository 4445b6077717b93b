"""TLS of the service's port: with certificates of the operator, or with a self-signed one that is created once.

The digest of a self-signed certificate is part of the URL that the service announces. Clients and nodes that use this
URL accept this certificate and no other (`core/address.py`).
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
BEGIN, END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"


@dataclass(frozen=True, slots=True)
class Tls:
    """The server's TLS context and the digest of its certificate. A self-signed one is trusted only by its digest."""

    context: ssl.SSLContext
    digest: bytes
    is_self_signed: bool


def open_tls(settings: Settings) -> Tls | None:
    """The TLS configuration, or None for plain HTTP. Raises `SettingsError` if the files cannot be used."""
    if settings.tls_cert is not None and settings.tls_key is not None:
        return Tls(_context(settings.tls_cert, settings.tls_key), digest_of(settings.tls_cert), is_self_signed=False)
    if settings.tls != "own":
        return None
    folder = settings.data_dir / FOLDER
    cert, key = folder / "cert.pem", folder / "key.pem"
    if not (cert.is_file() and key.is_file()):
        _make(folder, cert, key)
    return Tls(_context(cert, key), digest_of(cert), is_self_signed=True)


def digest_of(cert: Path) -> bytes:
    """SHA-256 of the first certificate in the file, in DER: the value of a URL's pin."""
    text = cert.read_text("latin-1")  # OpenSSL ignores what is around a certificate: names in any encoding, for example
    begin, end = text.find(BEGIN), text.find(END)
    if begin < 0 or end < begin:
        raise SettingsError(f"{cert} has no certificate that begins with {BEGIN}")
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(text[begin : end + len(END)])).digest()


def _context(cert: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise SettingsError(f"the certificate {cert} with the key {key} cannot be used: {error}") from error
    return context


def _make(folder: Path, cert: Path, key: Path) -> None:
    """Creates the key, readable by this user only, then the certificate, which appears when both are complete."""
    if shutil.which("openssl") is None:
        raise SettingsError("tls = own needs the program openssl; install it, or give tls_cert and tls_key")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = folder / f".cert.{os.getpid()}"
    subject = ["-subj", "/CN=rollyard", "-days", str(OWN_DAYS)]
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    mask = os.umask(0o077)
    try:
        completed = subprocess.run(
            ["openssl", "req", "-x509", *curve, *subject, "-keyout", str(key), "-out", str(draft)],
            capture_output=True,
            text=True,
            timeout=MAKE_S,
            stdin=subprocess.DEVNULL,
        )
    finally:
        os.umask(mask)
    if completed.returncode != 0:
        raise SettingsError(f"openssl could not create a certificate: {completed.stderr.strip()[-300:]}")
    draft.replace(cert)
