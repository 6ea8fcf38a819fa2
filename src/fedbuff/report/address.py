"""HOST:PORT, as people write it."""

import ipaddress


def host_and_port(address: str, called: str) -> tuple[str, int]:
    """The two parts of an address at which something is to be served; `called` is what its setting is called.

    >>> host_and_port("[::1]:8080", "--live")
    ('::1', 8080)
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{called} {address}: expected HOST:PORT, e.g. 127.0.0.1:8080 or [::1]:0")
    return host.removeprefix("[").removesuffix("]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("example.org"), is_loopback("::ffff:127.0.0.1")
    (True, True, False, True)
    """
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return (getattr(found, "ipv4_mapped", None) or found).is_loopback
