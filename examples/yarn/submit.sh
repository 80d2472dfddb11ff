#!/bin/sh
# Pack an environment and run a job with it on YARN: sh submit.sh [count_jobs.py]
set -eu
cd "$(dirname "$0")"
if [ ! -f environment.tar.gz ]; then
    python3 -m venv environment
    environment/bin/pip install 'penstock[spark]' venv-pack
    environment/bin/venv-pack -p environment -o environment.tar.gz
fi
export PYSPARK_DRIVER_PYTHON=environment/bin/python PYSPARK_PYTHON=./environment/bin/python
exec spark-submit --master yarn --archives environment.tar.gz#environment \
    --properties-file penstock.conf "${1:-count_jobs.py}"
