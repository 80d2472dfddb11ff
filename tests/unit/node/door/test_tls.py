import asyncio
import ssl
from pathlib import Path

import msgspec
import pytest
import trustme

from penstock.config import TlsOptions
from penstock.errors import InvalidArgument
from penstock.node.door.tls import client_context, server_context


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def issue(authority: trustme.CA, folder: Path, name: str = "localhost") -> TlsOptions:
    cert = authority.issue_cert(name)
    files = {part: folder / f"{name}.{part}.pem" for part in ("cert", "key", "ca")}
    cert.cert_chain_pems[0].write_to_path(files["cert"])
    cert.private_key_pem.write_to_path(files["key"])
    authority.cert_pem.write_to_path(files["ca"])
    return TlsOptions(**files)


async def echo(server: ssl.SSLContext, client: ssl.SSLContext) -> tuple[bytes, str | None]:
    """One byte there and back; what came back, and the TLS version."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.read(1))
        writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=server)
    async with listener:
        port = listener.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=client, server_hostname="localhost"
        )
        writer.write(b"x")
        version = writer.get_extra_info("ssl_object").version()
        try:
            return await reader.read(1), version
        finally:
            writer.close()


async def test_both_sides_talk(authority: trustme.CA, tmp_path: Path) -> None:
    options = issue(authority, tmp_path)
    answer, version = await echo(server_context(options), client_context(TlsOptions(ca=options.ca)))
    assert (answer, version) == (b"x", "TLSv1.3")


async def test_a_foreign_authority_is_refused(authority: trustme.CA, tmp_path: Path) -> None:
    server = server_context(msgspec.structs.replace(issue(authority, tmp_path), ca=None))
    (tmp_path / "other").mkdir()
    other = issue(trustme.CA(), tmp_path / "other")
    with pytest.raises(ssl.SSLCertVerificationError):
        await echo(server, client_context(TlsOptions(ca=other.ca)))


async def test_another_name_is_refused(authority: trustme.CA, tmp_path: Path) -> None:
    server = server_context(issue(authority, tmp_path, "elsewhere.example"))
    client = client_context(TlsOptions(ca=tmp_path / "elsewhere.example.ca.pem"))
    with pytest.raises(ssl.SSLCertVerificationError):
        await echo(server, client)


async def test_a_client_s_certificate_can_be_demanded(
    authority: trustme.CA, tmp_path: Path
) -> None:
    options = msgspec.structs.replace(issue(authority, tmp_path), require_client=True)
    try:  # how soon a client hears of it depends on the TLS version
        answer, _ = await echo(server_context(options), client_context(TlsOptions(ca=options.ca)))
    except (ssl.SSLError, ConnectionError):
        answer = b""
    assert answer == b""
    answer, _ = await echo(server_context(options), client_context(options))
    assert answer == b"x"


def test_old_versions_are_off(authority: trustme.CA, tmp_path: Path) -> None:
    options = issue(authority, tmp_path)
    for context in (server_context(options), client_context(options)):
        assert context.minimum_version == ssl.TLSVersion.TLSv1_2


@pytest.mark.parametrize("part", ["cert", "key", "ca"])
@pytest.mark.parametrize("damage", ["missing", "rubbish", "folder"])
def test_a_bad_file_is_named(authority: trustme.CA, tmp_path: Path, part: str, damage: str) -> None:
    bad = tmp_path / "bad.pem"
    if damage == "rubbish":
        bad.write_text("not a PEM file")
    elif damage == "folder":
        bad.mkdir()
    options = msgspec.structs.replace(issue(authority, tmp_path), **{part: bad})
    with pytest.raises(InvalidArgument, match=r"bad\.pem") as refusal:
        server_context(options)
    expected = "tls.cert" if (part, damage) == ("key", "rubbish") else f"tls.{part}"
    assert refusal.value.field == expected


def test_a_key_of_another_certificate_is_refused(authority: trustme.CA, tmp_path: Path) -> None:
    options = issue(authority, tmp_path)
    other = issue(authority, tmp_path, "other.example")
    with pytest.raises(InvalidArgument):
        server_context(msgspec.structs.replace(options, key=other.key))


def test_an_unset_file_is_named() -> None:
    with pytest.raises(InvalidArgument) as refusal:
        server_context(TlsOptions())
    assert refusal.value.field == "tls.cert"
