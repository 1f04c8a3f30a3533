# The gateway: the HTTP and gRPC edges. It has no torch.
#   docker build -f deploy/docker/gateway.Dockerfile -t tinsmith-gateway:0.1.0 .
ARG BASE_IMAGE=python:3.11-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b

FROM ${BASE_IMAGE} AS build
WORKDIR /src
COPY deploy/docker/requirements/gateway.txt requirements.txt
RUN python -m venv /opt/venv \
    && /opt/venv/bin/pip install --no-cache-dir --no-deps --require-hashes -r requirements.txt
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
# tini is the first process, so that a signal ends one that does not serve yet. Debian's package moves only with
# security fixes.
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
COPY services/gateway services/gateway
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONPATH=/app \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 10001:10001
EXPOSE 8000 8001 9090
ENTRYPOINT ["tini", "--", "python", "-m", "services.gateway"]
