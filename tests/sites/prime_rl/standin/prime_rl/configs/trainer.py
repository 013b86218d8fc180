"""The stand-in's settings of losses: the names and defaults of upstream after `default` was removed, IPO first."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class BaseConfig(BaseModel):
    """No key that isn't known."""

    model_config = ConfigDict(extra="forbid")


class IPOLossConfig(BaseConfig):
    """The default."""

    type: Literal["ipo"] = "ipo"
    eps: float = Field(0.3, ge=0)
    max_importance_ratio: float = Field(1e4, ge=1)
    adv_tau: float = Field(1.0, ge=0)
    score_centering: bool = False


class IcePopLossConfig(BaseConfig):
    """A band of ratios."""

    type: Literal["icepop"] = "icepop"
    ratio_low: float = Field(0.2, gt=0)
    ratio_high: float = Field(5.0, gt=0)
    adv_tau: float = Field(1.0, ge=0)


class PPOLossConfig(BaseConfig):
    """The clipped surrogate."""

    type: Literal["ppo"] = "ppo"
    ratio_low: float = Field(0.8, gt=0, le=1)
    ratio_high: float = Field(1.2, ge=1)
    adv_tau: float = Field(1.0, ge=0)


class CISPOLossConfig(BaseConfig):
    """A clipped weight on the log-probability."""

    type: Literal["cispo"] = "cispo"
    ratio_low: float | None = Field(None, ge=0)
    ratio_high: float = Field(5.0, gt=0)
    adv_tau: float = Field(1.0, ge=0)


class CustomLossConfig(BaseConfig):
    """A function by its path."""

    type: Literal["custom"] = "custom"
    import_path: str
    kwargs: dict[str, Any] = {}


LossConfig = Annotated[
    IPOLossConfig | IcePopLossConfig | PPOLossConfig | CISPOLossConfig | CustomLossConfig, Field(discriminator="type")
]
