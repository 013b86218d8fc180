"""The hinted context: token for token the rollout's, with the hint at the end of the body before the call alone."""

import pytest

from composer_prime.config.teachers import HintKind
from composer_prime.hints.answers import LINE_CHARS
from composer_prime.hints.contexts import TEMPLATES, hint_text, hinted_context
from composer_prime.hints.error_sites import ErrorSite, error_sites
from tests.traces.turns import node

HINT = [901, 902, 903]


def conversation() -> list:
    return [
        node(None, "user", [1, 2]),
        node(0, "assistant", [3, 4, 5], num_sampled=2),
        node(1, "tool", [6, 7, 8, 9], content="fine", body=[1, 2], name="bash"),
        node(2, "assistant", [10, 11, 12, 13], num_sampled=3),
        node(3, "tool", [14], content="Error: no", name="bash"),
        node(4, "assistant", [15, 16], num_sampled=1),
    ]


def test_the_hint_ends_the_body_before_the_call_and_the_calls_sampled_tokens_are_the_rollouts_own() -> None:
    nodes = conversation()
    (site,) = error_sites(nodes)
    context = hinted_context(nodes, site, HINT)
    assert context is not None and context.node is nodes[3]
    assert context.token_ids == [1, 2, 3, 4, 5, 6, 7, 8, *HINT, 9, 10, 11, 12, 13]
    assert [context.token_ids[place] for place in context.places] == [11, 12, 13]


def test_tokens_after_the_turns_last_sampled_one_and_other_branches_stay_out() -> None:
    nodes = conversation()
    nodes[3].token_ids = [*nodes[3].token_ids, 99]
    nodes[3].mask = [*nodes[3].mask, False]
    nodes.append(node(1, "tool", [70, 71], content="fine", body=[0]))
    (site,) = error_sites(nodes)
    context = hinted_context(nodes, site, HINT)
    assert context is not None
    assert context.token_ids[-3:] == [11, 12, 13] and 70 not in context.token_ids


def test_without_a_known_body_there_is_no_place_for_a_hint() -> None:
    nodes = conversation()
    nodes[2].is_content = []
    (site,) = error_sites(nodes)
    assert hinted_context(nodes, site, HINT) is None


@pytest.mark.parametrize("role", ["system", "assistant"])
def test_a_hint_stands_in_a_users_or_a_tools_message_alone(role: str) -> None:
    nodes = conversation()
    nodes[2] = node(1, role, [6, 7, 8, 9], body=[1, 2])
    (site,) = error_sites(nodes)
    assert hinted_context(nodes, site, HINT) is None


@pytest.mark.parametrize("kind", sorted(TEMPLATES))
def test_the_hint_names_the_error_and_the_tool_and_a_recipes_template_wins(kind: HintKind) -> None:
    site = ErrorSite(1, 2, kind, "Error: {no} such thing", "bash")
    text = hint_text(site, {})
    assert text is not None and text.startswith("\n\nHint: ") and "Error: {no} such thing" in text
    assert "{tool}" not in TEMPLATES[kind] or "call bash as" in text
    own = hint_text(site, {kind: "{tool} said {error}, {{really}}"})
    assert own == "\n\nbash said Error: {no} such thing, {really}"
    nameless = hint_text(ErrorSite(1, 2, kind, "x", None), {kind: "{tool} said {error}"})
    assert nameless == "\n\nthe tool said x"


def test_a_tools_name_that_the_policy_made_up_is_quoted_as_far_as_an_errors_line_is() -> None:
    site = ErrorSite(1, 2, "unknown_tool", "x", "n" * 10**6)
    assert hint_text(site, {"unknown_tool": "{tool}" * 600}) == "\n\n" + "n" * 600 * LINE_CHARS


def test_failed_tests_are_taught_only_by_a_recipes_template() -> None:
    site = ErrorSite(1, 2, "tests", "1 failed in 0.1s", "bash")
    assert hint_text(site, {}) is None and hint_text(site, {"tests": "{error}"}) == "\n\n1 failed in 0.1s"


def test_what_the_environment_says_to_do_is_the_hint_unless_the_recipe_has_a_template() -> None:
    nodes = conversation()
    nodes[4].message.content = '{"error": "locked", "error_kind": "error", "hint": "call unlock first"}'
    (site,) = error_sites(nodes)
    assert hint_text(site, {}) == "\n\nHint: call unlock first"
    assert hint_text(site, {"error": "{error}!"}) == "\n\nlocked!"
    assert hint_text(site, {"timeout": "{error}!"}) == "\n\nHint: call unlock first"


def test_a_failed_test_is_taught_by_what_the_environment_says() -> None:
    site = ErrorSite(1, 2, "tests", "1 failed in 0.1s", "bash", hint="call run_tests with the file's name")
    assert hint_text(site, {}) == "\n\nHint: call run_tests with the file's name"
