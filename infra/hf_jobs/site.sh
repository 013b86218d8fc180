#!/bin/bash
# One site of a run as a job of Hugging Face, for those who don't use `composer-prime launch`. The bucket's credentials, and
# HF_TOKEN for a gated model, come from your environment and are seen by the job alone. Build and push the image from infra/docker/Dockerfile, or for an
# embedded site from infra/compose/Dockerfile.
#   export AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=...
#   NAMESPACE=me IMAGE=ghcr.io/me/composer-prime RECIPE=recipes/multi_site/reverse_text_2.toml SITE=a FLAVOR=a10g-largex2 \
#       infra/hf_jobs/site.sh --outer.store s3://my-bucket/runs
# Then `hf jobs logs ID`, `hf jobs cancel ID`. A job's folder is gone with it: started again, a site goes on from the bucket.
set -euo pipefail

: "${NAMESPACE:?set NAMESPACE to the user or organisation that pays}"
: "${IMAGE:?set IMAGE to the image that has composer-prime}"
: "${RECIPE:?set RECIPE to the TOML file of the run, in the image}"
: "${SITE:?set SITE to the name of this site}"
: "${AWS_ACCESS_KEY_ID:?export AWS_ACCESS_KEY_ID, which reaches the job as a secret}"
: "${AWS_SECRET_ACCESS_KEY:?export AWS_SECRET_ACCESS_KEY, which reaches the job as a secret}"

# Its own limit would be half an hour.
exec hf jobs run --detach --namespace "$NAMESPACE" --flavor "${FLAVOR:-cpu-upgrade}" --timeout "${TIMEOUT:-24h}" \
    --attempts "${ATTEMPTS:-3}" --label "composer-prime-site=$SITE" \
    --secrets AWS_ACCESS_KEY_ID --secrets AWS_SECRET_ACCESS_KEY ${AWS_SESSION_TOKEN:+--secrets AWS_SESSION_TOKEN} \
    ${HF_TOKEN:+--secrets HF_TOKEN} \
    --env "AWS_DEFAULT_REGION=${AWS_DEFAULT_REGION:-us-east-1}" \
    ${AWS_ENDPOINT_URL:+--env "AWS_ENDPOINT_URL=$AWS_ENDPOINT_URL"} \
    "$IMAGE" composer-prime site "$RECIPE" --site "$SITE" --resume --output_dir /tmp/outputs "$@"
