"""Who gets an answer from the dashboard: by Host, by where the request comes from, and by the key in the printed address."""

from tests.tables import parametrize
from tunix_rt.dashboard.guard import Guard, new_key
from tunix_rt.loopback import LOOPBACK, MOST_HEADER_BYTES

KEY = new_key()
GUARD = Guard(hosts=(*LOOPBACK, "box.example"), key=KEY, port=8080)


def head(*pairs: tuple[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in pairs]


@parametrize("status", "method", "hosts", "pairs")
def test_a_request_is_answered_or_refused_by_its_head(status, method, hosts, pairs):
    refused = GUARD.refusal(method, b"/", head(*(("host", host) for host in hosts), *pairs))
    assert (refused.status if refused else 200) == status


def test_a_head_that_is_too_large_is_refused():
    for path, *pairs in (
        (b"/", ("cookie", "a" * MOST_HEADER_BYTES)),
        (b"/" + b"a" * 30_000,),
        (b"/", *[("x", "y" * 100)] * 200),
    ):
        assert GUARD.refusal("GET", path, head(("host", "localhost"), *pairs)).status == 431


def test_the_cookie_is_bound_to_the_port_and_compared_whole():
    def holds(cookie: str) -> bool:
        return GUARD.holds_key(head(("cookie", cookie)))

    foreign = ("other=1", 'a=b; {"x": 1}', "a,b", "=;;=", '"', "\xff=\xff", "tunix_rt_8080=old")
    assert holds(f"tunix_rt_8080={KEY}") and all(holds(f"{one}; tunix_rt_8080={KEY};{one}") for one in foreign)
    short, long = KEY[:-1], KEY + "x"
    wrong = ("", f"tunix_rt_8081={KEY}", f"tunix_rt_8080={short}", f"tunix_rt_8080={long}", "tunix_rt_8080=", "\xff=;;")
    assert not any(map(holds, wrong))
    assert Guard(hosts=LOOPBACK, key=None, port=1).holds_key(head())
    assert not GUARD.is_key("") and GUARD.is_key(KEY) and not GUARD.is_key("ü")
    assert not Guard(hosts=LOOPBACK, key=None, port=1).is_key("")
    guard = Guard(hosts=LOOPBACK, key=KEY, port=1, once=["first"])
    assert [guard.is_key(one) for one in ("firs", "first", "first", KEY, KEY)] == [False, True, False, True, True]
    assert f"={KEY};" in guard.set_cookie() and not Guard(hosts=LOOPBACK, key=None, port=1, once=["x"]).is_key("x")
