"""Whether the jobs of a launch may fetch their model: asked of the Hugging Face hub before anything is billed."""

from collections.abc import Iterator
from pathlib import Path

import httpx

from composer_prime.config.recipe import TINY_MODELS
from composer_prime.errors import BadInput
from composer_prime.launch.plan import LaunchPlan

HUB = "https://huggingface.co"
TIMEOUT_S = 10.0
REFUSED = frozenset({401, 403, 404})


def access_lines(plan: LaunchPlan) -> Iterator[str]:
    """Nothing for a model that the jobs may fetch, or that isn't the hub's; a line where it can't be known.

    Raises BadInput for a model that the hub doesn't give to the token that the jobs will have.
    """
    name = plan.recipe.model.name
    if name in TINY_MODELS or name.startswith(("/", ".", "~")) or Path(name).exists():
        return
    token, has_own = _token(plan)
    hub = plan.env.get("HF_ENDPOINT", HUB).rstrip("/")
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    try:
        address = f"{hub}/api/models/{name}/auth-check"
        answer = httpx.get(address, headers=headers, timeout=TIMEOUT_S, follow_redirects=True)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        yield f"access to {name}: not checked ({hub} doesn't answer: {type(error).__name__})"
        return
    if answer.status_code not in REFUSED:
        if not answer.is_success:
            yield f"access to {name}: not checked ({hub} answers {answer.status_code})"
        return
    refusal = _refusal(name, hub, answer, has_token=token is not None)
    if not has_own:
        raise BadInput(refusal)
    yield f"access to {name}: not certain, since the machines may have the model or a login of their own: {refusal}"


def _token(plan: LaunchPlan) -> tuple[str | None, bool]:
    """The token that the jobs will have, and whether they may have more than is known here.

    A login's token is a file: on platforms it stays behind, and this machine's own jobs find it.
    """
    token = plan.secrets.reveal().get("HF_TOKEN")
    if plan.is_local:
        from huggingface_hub import get_token, try_to_load_from_cache

        cached = try_to_load_from_cache(plan.recipe.model.name, "config.json")
        return token or get_token(), isinstance(cached, str)
    return token, set(plan.platforms) == {"ssh"} and token is None


def _refusal(name: str, hub: str, answer: httpx.Response, *, has_token: bool) -> str:
    """One line: the model, what the hub says, what to do."""
    code = answer.headers.get("X-Error-Code", "")
    said = f"model.name ({name}): {hub} answers {answer.status_code}{f' {code}' if code else ''}"
    token = "HF_TOKEN" if has_token else "no HF_TOKEN, which jobs get from this environment"
    if code == "GatedRepo":
        what = "is gated, and its terms must be accepted by the token's account"
        remedy = f"accept them at {hub}/{name}, and export that account's HF_TOKEN"
    elif answer.status_code == 404 or code == "RepoNotFound":
        what = "isn't there, or is private"
        remedy = "correct the name, or export the HF_TOKEN of an account that may read it"
    else:
        what = "isn't given to this token" if has_token else "isn't given without a token"
        remedy = "export the HF_TOKEN of an account that may read it"
    return f"{said}: it {what} (asked with {token}): {remedy}"
