"""Secrets of 53 kinds, made up here from parts, so that no scanner takes this file for a leak."""

import random
import string

_dice = random.Random(42)


def _some(length: int, alphabet: str = string.ascii_letters + string.digits) -> str:
    drawn = "".join(_dice.choice(alphabet) for _ in range(length - 2))
    return f"a{drawn}7" if alphabet[0].isalpha() and len(alphabet) > 36 else f"{drawn}{alphabet[0]}{alphabet[-1]}"


_HEX, _UPPER, _SAFE = (
    string.digits + "abcdef",
    string.ascii_uppercase + "234567",
    string.ascii_letters + string.digits + "_-",
)

BY_FORM = {
    "anthropic": "sk-" + "ant-api03-" + _some(40),
    "openai": "sk-" + "proj-" + _some(48),
    "openai old": "sk-" + _some(48),
    "openrouter": "sk-" + "or-v1-" + _some(64, _HEX),
    "gemini": "AI" + "za" + _some(35, _SAFE),
    "google oauth": "ya" + "29." + _some(40),
    "hugging face": "hf" + "_" + _some(34),
    "github": "gh" + "p_" + _some(36),
    "github fine": "github" + "_pat_" + _some(60),
    "github app": "gh" + "s_" + _some(36),
    "gitlab": "gl" + "pat-" + _some(20),
    "npm": "np" + "m_" + _some(36),
    "pypi": "py" + "pi-AgEIcHlwaS5vcmc" + _some(70),
    "docker": "dckr" + "_pat_" + _some(27),
    "aws id": "AK" + "IA" + _some(16, _UPPER),
    "aws session id": "AS" + "IA" + _some(16, _UPPER),
    "slack bot": "xo" + "xb-1234567890-" + _some(24),
    "slack app": "xa" + "pp-1-A0123456789-" + _some(40),
    "discord": "M" + _some(24) + "." + _some(6) + "." + _some(27),
    "square": "sq0" + "csp-" + _some(43),
    "artifactory": "AK" + "C" + _some(70),
    "nvidia": "nv" + "api-" + _some(64),
    "slack user": "xo" + "xp-1234567890-" + _some(24),
    "stripe": "sk" + "_live_" + _some(24),
    "stripe restricted": "rk" + "_live_" + _some(24),
    "stripe webhook": "wh" + "sec_" + _some(32),
    "sendgrid": "S" + "G." + _some(22) + "." + _some(43),
    "xai": "xa" + "i-" + _some(80),
    "groq": "gs" + "k_" + _some(52),
    "perplexity": "pp" + "lx-" + _some(48),
    "replicate": "r8" + "_" + _some(37),
    "fireworks": "fw" + "_" + _some(24),
    "databricks": "da" + "pi" + _some(32, _HEX),
    "digitalocean": "do" + "p_v1_" + _some(64, _HEX),
    "vault": "hv" + "s." + _some(24),
    "notion": "nt" + "n_" + _some(46),
    "linear": "lin" + "_api_" + _some(40),
    "shopify": "sh" + "pat_" + _some(32, _HEX),
    "telegram": "1234567890:" + _some(35, _SAFE),
    "mailchimp": _some(32, _HEX) + "-us12",
    "jwt": "ey" + "J" + _some(30) + ".ey" + "J" + _some(60) + "." + _some(43),
}
"""Known wherever they stand."""

BY_NAME = {
    "AWS_SECRET_ACCESS_KEY": _some(40),
    "AWS_SESSION_TOKEN": _some(120),
    "WANDB_API_KEY": _some(40, _HEX),
    "DB_PASSWORD": "correct-horse-battery",
    "MYSQL_PWD": "tr0ub4dor&3x",
    "AZURE_OPENAI_KEY": _some(32, _HEX),
    "MODAL_TOKEN_SECRET": "as-" + _some(22),
    "TWILIO_AUTH_TOKEN": _some(32, _HEX),
    "DJANGO_SECRET": "plain words with spaces",
    "SMTP_PASS": "letters-only-here",
    "SESSION_COOKIE": _some(30),
}
"""Known by the names of their variables."""

DATABASE_PASSWORD = _some(14)
AZURE_ACCOUNT_KEY = _some(86) + "=="
ENVIRONMENT = BY_NAME | {
    "GITHUB_TOKEN": BY_FORM["github"],
    "OPENROUTER_API_KEY": BY_FORM["openrouter"],
    "GEMINI_API_KEY": BY_FORM["gemini"],
    "STRIPE_API_KEY": BY_FORM["stripe"],
    "AZURE_STORAGE_CONNECTION_STRING": f"AccountName=x;AccountKey={AZURE_ACCOUNT_KEY};Suffix=y",
    "DATABASE_URL": f"postgres://app:{DATABASE_PASSWORD}@db.internal:5432/app",
}
"""Variables of a process that has them all."""

ALL = {*BY_FORM.values(), *BY_NAME.values(), DATABASE_PASSWORD, AZURE_ACCOUNT_KEY}
assert len(ALL) >= 40


def assigned(environment: dict[str, str]) -> str:
    """As `env` prints them; a tool's output, say."""
    return "".join(f"{name}={value}\n" for name, value in environment.items())


def found_in(text: str) -> list[str]:
    """The secrets that stand in a text."""
    return sorted(secret for secret in ALL if secret in text)
