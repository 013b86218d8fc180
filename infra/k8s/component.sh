#!/bin/bash
# One component of a site, as a pod of PRIME-RL's Helm chart starts it: component.sh orchestrator | inference | trainer.
# The orchestrator's pod renders and checks the configuration; the others wait for it on the volume that all share.
#   RECIPE, RUN, SITE  the recipe's file, its run.name, and this site's name
#   DATA               the folder on the shared volume that is the recipe's output_dir
set -euo pipefail

: "${RECIPE:?set RECIPE to the TOML file of the run}"
: "${RUN:?set RUN to the run.name of the recipe}"
: "${SITE:?set SITE to the name of this site}"
: "${DATA:?set DATA to a folder on the shared volume}"
rendered="$DATA/$RUN.dry-run/sites/$SITE"
configs="$rendered/prime-rl/configs"
run="$DATA/$RUN/sites/$SITE/prime-rl"

if [[ "$1" == orchestrator && ! -e "$rendered/ready" ]]; then
    composer-prime site "$RECIPE" --site "$SITE" --dry-run --output_dir "$DATA" --run.name "$RUN"
    touch "$rendered/ready"
fi
until [[ -e "$rendered/ready" ]]; do sleep 2; done

arguments=(--output-dir "$run")
if compgen -G "$run/checkpoints/step_*" >/dev/null; then
    step=$(python -c 'import pathlib, sys
from composer_prime.sites.prime_rl.checkpoints import newest_whole
folder = pathlib.Path(sys.argv[1])
print(newest_whole(folder, folder) or "")' "$run/checkpoints")
    [[ -z "$step" ]] || arguments+=(--resume.step "$step")
fi

case "$1" in
    orchestrator)
        for source in "$configs"/envs/*/*.json; do
            env-server @ "$source" &
        done
        exec orchestrator @ "$configs/orchestrator.json" "${arguments[@]}" --model.client.base-url "$INFERENCE_URL"
        ;;
    inference)
        exec inference @ "$configs/inference.json"
        ;;
    trainer)
        # PRIME-RL's launcher would set these; without it the pod does.
        mapfile -t variables < <(python -c 'import json, sys
for name, value in json.load(open(sys.argv[1]))["env_vars"].items(): print(f"{name}={value}")' "$configs/trainer.json")
        exec env "${variables[@]}" torchrun --nproc-per-node "${GPUS:-1}" -m prime_rl.trainer.rl.train \
            @ "$configs/trainer.json" "${arguments[@]}"
        ;;
    *)
        echo "component.sh: $1 is no component: say orchestrator, inference or trainer" >&2
        exit 2
        ;;
esac
