# A trainer world: one rank, or an agent and its ranks, all in one container. It has no vllm.
#   docker build -f deploy/docker/trainer.Dockerfile -t tinsmith-trainer:0.1.0 .
#   docker build -f deploy/docker/trainer.Dockerfile -t tinsmith-trainer:0.1.0-cuda --build-arg DEVICE=cuda .
ARG BASE_IMAGE=python:3.11-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b

FROM ${BASE_IMAGE} AS build
# cpu or cuda; a cuda build needs no CUDA in the base image, the wheels bring it along.
ARG DEVICE=cpu
# Where CPU builds of torch come from; a cuda build takes its torch from PyPI.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# Debian's stable g++ moves only with security fixes, and no image outlives its build by it.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY deploy/docker/requirements/trainer-${DEVICE}.txt requirements.txt
COPY deploy/docker/requirements/build-wheel.txt ./
# DeepSpeed comes as source: it needs torch to be there, and on CPU its shared-memory communication is
# compiled here, because the running container has no compiler.
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
RUN python -m venv /opt/venv \
    && index=() && build_shm=0 \
    && if [ "${DEVICE}" = cpu ]; then index=(--extra-index-url "${TORCH_INDEX}"); build_shm=1; fi \
    && grep '^torch==' requirements.txt > torch.txt \
    && grep '^deepspeed==' requirements.txt > source.txt \
    && grep -v -e '^torch==' -e '^deepspeed==' requirements.txt > wheels.txt \
    && /opt/venv/bin/pip install --no-cache-dir --no-deps --require-hashes "${index[@]}" -r torch.txt \
    && /opt/venv/bin/pip install --no-cache-dir --no-deps --require-hashes -r wheels.txt -r build-wheel.txt \
    && DS_BUILD_SHM_COMM="${build_shm}" \
       /opt/venv/bin/pip install --no-cache-dir --no-deps --require-hashes --no-build-isolation -r source.txt
COPY deploy/docker/requirements/build-protoc.txt deploy/docker/requirements/build-sbom.txt ./
COPY proto proto
RUN python -m venv /opt/protoc \
    && /opt/protoc/bin/pip install --no-cache-dir --no-deps --require-hashes -r build-protoc.txt \
    && /opt/protoc/bin/python -m grpc_tools.protoc -Iproto --python_out=. --grpc_python_out=. \
        proto/tinsmith/v1/*.proto proto/tinsmith/internal/v1/*.proto
RUN python -m venv /opt/sbom \
    && /opt/sbom/bin/pip install --no-cache-dir --no-deps --require-hashes -r build-sbom.txt \
    && /opt/sbom/bin/cyclonedx-py environment --output-reproducible --output-file sbom.cdx.json /opt/venv/bin/python

FROM ${BASE_IMAGE}
# tini is the first process and collects what ranks leave behind. Debian's package moves only with security fixes.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends tini \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 tinsmith \
    && useradd --uid 10001 --gid 10001 --create-home tinsmith
COPY --from=build /opt/venv /opt/venv
COPY --from=build /src/sbom.cdx.json /usr/share/sbom/tinsmith.cdx.json
WORKDIR /app
COPY --from=build /src/tinsmith tinsmith
COPY services/__init__.py services/
COPY services/common services/common
COPY services/trainer services/trainer
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONPATH=/app \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 10001:10001
EXPOSE 9000 9090
ENTRYPOINT ["tini", "--", "python", "-m", "services.trainer.world.launch"]
