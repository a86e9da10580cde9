"""What is said about unknown names."""

from hps.suggestions import did_you_mean, hint_for, name_list


def test_the_nearest_name_whatever_its_case():
    assert did_you_mean("USR", ["item", "User"]) == "; did you mean 'User'?"
    assert did_you_mean(17, ["item"]) == ""


def test_nothing_is_near_what_is_no_name(monkeypatch):
    """A client's name may be as long as its request."""
    monkeypatch.setattr("hps.suggestions.get_close_matches", lambda *_args, **_more: 1 / 0)
    assert did_you_mean("x" * 501, ["x" * 500]) == ""


def test_without_a_near_one_all_there_are():
    assert hint_for("x", ["user", "item"]) == "; it has user, item"
    assert hint_for("x", {"user": 1}, "the tables are") == "; the tables are user"
    assert hint_for("usr", ["user", "item"], "the tables are") == "; did you mean 'user'?"
    assert hint_for("x", []) == "; it has none"


def test_a_long_list_is_cut_short():
    assert name_list([str(n) for n in range(20)], 3) == "0, 1, 2, … (20 in all)"
