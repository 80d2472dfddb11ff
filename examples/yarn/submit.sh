#!/bin/sh
# Pack an environment and run a job with it on YARN: PENSTOCK_URL=… sh submit.sh [my_job.py]
set -eu
: "${PENSTOCK_URL:?says where the node is}"
folder="$(cd "$(dirname "$0")" && pwd)"
if [ ! -f "$folder/environment.tar.gz" ]; then
    python3 -m venv "$folder/environment"
    "$folder/environment/bin/pip" install 'penstock[spark]' venv-pack
    "$folder/environment/bin/venv-pack" -p "$folder/environment" -o "$folder/environment.tar.gz"
fi
export PYSPARK_DRIVER_PYTHON="$folder/environment/bin/python" PYSPARK_PYTHON=./environment/bin/python
exec spark-submit --master yarn --archives "$folder/environment.tar.gz#environment" \
    --properties-file "$folder/penstock.conf" \
    --conf "spark.executorEnv.PENSTOCK_URL=$PENSTOCK_URL" "${1:-$folder/count_jobs.py}"
