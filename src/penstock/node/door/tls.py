"""TLS contexts from PEM files, with errors that name the option and the file."""

from __future__ import annotations

import ssl
from pathlib import Path

from penstock.config import TlsOptions
from penstock.errors import InvalidArgument


def server_context(options: TlsOptions) -> ssl.SSLContext:
    """What a listener needs. With a `ca`, a client's certificate is verified if it sends one, and
    demanded with `require_client`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _harden(context)
    _load_cert(context, options)
    if options.ca is not None:
        _load_ca(context, options.ca)
        context.verify_mode = ssl.CERT_REQUIRED if options.require_client else ssl.CERT_OPTIONAL
    return context


def client_context(options: TlsOptions) -> ssl.SSLContext:
    """What a node needs to call another: the peer is verified against `ca` (or the system's
    authorities) and by name; `cert` and `key` are shown if given."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _harden(context)
    if options.ca is not None:
        _load_ca(context, options.ca)
    else:
        context.load_default_certs(ssl.Purpose.SERVER_AUTH)
    if options.cert is not None:
        _load_cert(context, options)
    return context


def _harden(context: ssl.SSLContext) -> None:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION


def _load_cert(context: ssl.SSLContext, options: TlsOptions) -> None:
    cert, key = options.cert, options.key
    _check_readable(cert, "tls.cert")
    _check_readable(key, "tls.key")
    assert cert is not None
    try:
        # an encrypted key would otherwise stop the start with a prompt
        context.load_cert_chain(cert, key, password=_refuse_password)
    except ssl.SSLError as error:
        raise InvalidArgument(
            f"{cert} and {key} are not a certificate and its key: {error.reason or error}",
            field="tls.cert",
        ) from error


def _refuse_password() -> str:
    raise InvalidArgument("tls.key is encrypted; give one without a password", field="tls.key")


def _load_ca(context: ssl.SSLContext, ca: Path) -> None:
    _check_readable(ca, "tls.ca")
    try:
        context.load_verify_locations(ca)
    except ssl.SSLError as error:
        raise InvalidArgument(f"{ca} has no certificate in it", field="tls.ca") from error


def _check_readable(path: Path | None, field: str) -> None:
    if path is None:
        raise InvalidArgument(f"{field} is not set", field=field)
    try:
        path.read_bytes()
    except OSError as error:
        raise InvalidArgument(f"cannot read {path}: {error.strerror}", field=field) from error
