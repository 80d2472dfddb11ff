import ssl
from pathlib import Path

import pytest
import trustme

from penstock.client.network.endpoints import Address
from penstock.errors import InvalidArgument


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("penstock://", Address("127.0.0.1", 7440, False)),
        ("penstock://db:9", Address("db", 9, False)),
        ("penstocks://[::1]:9", Address("::1", 9, True)),
    ],
)
def test_a_url_names_host_port_and_tls(url: str, expected: Address) -> None:
    assert Address.parse(url) == expected
    assert Address.parse(str(expected)) == expected


def test_several_nodes_stand_in_one_url_or_in_a_list() -> None:
    a, b, c = Address("a", 1, True), Address("::2", 7440, True), Address("c", 3, True)
    assert Address.parse_all("penstocks://a:1,[::2],c:3") == [a, b, c]
    assert Address.parse_all(["penstocks://a:1", "penstocks://c:3,a:1"]) == [a, c]
    for urls in ([], ["penstock://a", "penstocks://b"], ["a:1"], "penstock://a,b/x"):
        with pytest.raises(InvalidArgument):
            Address.parse_all(urls)


def test_tls_belongs_to_penstocks(tmp_path: Path) -> None:
    authority = tmp_path / "ca.pem"
    trustme.CA().cert_pem.write_to_path(str(authority))
    plain, secure = Address("a", 1, False), Address("a", 1, True)
    own = ssl.create_default_context()
    assert plain.context(None) is None
    assert secure.context(own) is own
    assert secure.context(authority) is not None and secure.context(True) is not None
    for address, tls in ((plain, True), (secure, False)):
        with pytest.raises(InvalidArgument):
            address.context(tls)
