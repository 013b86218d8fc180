"""The loss token by token in plain Python floats (fp64), written from DESIGN section 3's formulas, and its gradient.

Shares no code with composer_prime.losses. The gradient is worked out by hand: factors are constants, and
ratio' = ratio, or 0 above the cap.
"""

import math
from dataclasses import dataclass, field


@dataclass
class Reference:
    loss: float = 0.0
    magnitude: float = 0.0  # sum of |terms|: the scale on which rounding is judged
    policy: float = 0.0
    kl: float = 0.0
    replay: float = 0.0
    gradient: list[float] = field(default_factory=list)
    kept: list[bool] = field(default_factory=list)
    num_teacher_tokens: int = 0


def reference_loss(
    trainer, inference, advantages, mask, refs=None, weights=None, *,
    low=0.2, high=0.2, adv_tau=1.0, kl_tau=1e-3, replay_tau=0.0, replay_clip=5.0,
    ratio_cap=20.0,
) -> Reference:  # fmt: skip
    out = Reference()
    for t, (lt, li, adv, trained) in enumerate(zip(trainer, inference, advantages, mask, strict=True)):
        if not trained:
            out.gradient.append(0.0)
            out.kept.append(False)
            continue
        weight = 1.0 if weights is None else weights[t]
        ref = 0.0 if refs is None else refs[t]
        log_ir = lt - li
        capped = math.exp(log_ir) > ratio_cap
        ir = ratio_cap if capped else math.exp(log_ir)
        moved = math.exp(lt) - math.exp(li)
        keep = not (moved > high if adv > 0 else moved < -low)
        keep_replay = not moved < -low
        taught = math.isfinite(ref) and ref != 0.0
        policy = -adv_tau * adv * ir if keep else 0.0
        kl = kl_tau * log_ir**2
        pull = max(-replay_clip, min(replay_clip, ref - lt)) if taught else 0.0
        replay = -replay_tau * pull * ir if taught and keep_replay else 0.0
        out.policy += weight * policy
        out.kl += weight * kl
        out.replay += weight * replay
        out.loss += weight * (policy + kl + replay)
        out.magnitude += abs(weight) * (abs(policy) + abs(kl) + abs(replay))
        out.gradient.append(weight * (2.0 * kl_tau * log_ir + (0.0 if capped else policy + replay)))
        out.kept.append(keep)
        out.num_teacher_tokens += taught
    return out


def reference_mismatch_kl(trainer, inference, chosen) -> float:
    """Mean of ir - log_ir - 1 over the chosen tokens, 0 when there is none."""
    gaps = [lt - li for lt, li, wanted in zip(trainer, inference, chosen, strict=True) if wanted]
    return sum(math.exp(gap) - gap - 1.0 for gap in gaps) / max(len(gaps), 1)
