from emberline.store.notifications import Notifier


async def test_what_arrived_before_the_state_is_read_can_be_skipped() -> None:
    notifier = Notifier()
    heard = notifier.subscribe("news", poll_s=30)
    for payload in ("a", "b", "c"):
        notifier.publish("news", payload)
    assert await anext(heard) == "a"
    heard.skip()
    notifier.publish("news", "d")
    assert await anext(heard) == "d"
