"""Who leaves first and who is served next, by address."""

from torchmuster.core.net.listener import Seats


def seats(*callers):
    found = Seats()
    for now, (caller, address) in enumerate(callers):
        found.take(caller, address, float(now))
    return found


def test_the_oldest_caller_of_the_greediest_address_leaves_first():
    found = seats(("honest", "n2"), ("a", "flood"), ("b", "flood"))
    assert found.oldest_of_the_crowd() == ("a", 1.0)


def test_the_address_with_the_fewest_callers_is_served_first():
    found = seats(("a", "flood"), ("b", "flood"), ("honest", "n2"))
    assert found.next_in_turn() == "honest"


def test_callers_of_one_address_are_served_in_order():
    found = seats(("a", "n1"), ("b", "n1"), ("c", "n1"))
    order = []
    while len(found):
        order.append(found.next_in_turn())
        found.leave(order[-1])
    assert order == ["a", "b", "c"]


def test_who_leaves_says_from_where_he_called_and_leaves_once():
    found = seats(("a", "n1"))
    assert found.leave("a") == "n1"
    assert found.leave("a") is None
    assert len(found) == 0
