# The hps image: docker build --tag hps-server:0.1.0 .
# With what a GPU needs (a CUDA 13 driver on the machine, nothing else): … --target gpu --tag hps-server:0.1.0-gpu .
#
# BASE is any image with Python >= 3.11, its headers and apt-get; both stages use the same one.
ARG BASE=python:3.12.12-slim-bookworm@sha256:593bd06efe90efa80dc4eee3948be7c0fde4134606dd40d8dd8dbcade98e669c

# -- dependencies: compiler and build tools, which stay here; what hps needs, locked, with hashes -----
FROM ${BASE} AS dependencies
# The compiler of the base's distribution release: it leaves nothing in the image but the native core.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY requirements/build.txt requirements/otel.txt requirements/
ENV PATH=/opt/tools/bin:$PATH UV_LINK_MODE=copy
RUN python3 -m venv /opt/tools \
 && pip install --no-cache-dir --disable-pip-version-check --require-hashes -r requirements/build.txt \
 && python3 -m venv --without-pip /opt/hps
# With the extra `otel`. Tests and headers are left out, and what PyArrow has for other services than ours.
RUN uv pip install --no-cache --python /opt/hps/bin/python --require-hashes -r requirements/otel.txt \
 && find /opt/hps/lib -type d \( -name tests -o -path '*/pyarrow/include' \) -prune -exec rm -rf {} + \
 && find /opt/hps/lib -path '*/pyarrow/*' \( -name '*flight*' -o -name '*s3*' \) -delete \
 && /opt/hps/bin/python -I -c 'import pyarrow.compute, pyarrow.csv, pyarrow.parquet' \
 && /opt/hps/bin/python -m compileall -q -j 0 --invalidation-mode unchecked-hash /opt/hps/lib

# -- dependencies-gpu: the same with CUDA, cuDNN, CuPy and onnxruntime-gpu ----------------------------
FROM dependencies AS dependencies-gpu
COPY requirements/gpu.txt requirements/
# onnxruntime-gpu takes the place of onnxruntime: both fill the same folder.
RUN uv pip uninstall --python /opt/hps/bin/python onnxruntime \
 && uv pip install --cache-dir /tmp/uv --python /opt/hps/bin/python --require-hashes -r requirements/gpu.txt \
 && rm -rf /tmp/uv \
 && /opt/hps/bin/python -m compileall -q -j 0 --invalidation-mode unchecked-hash /opt/hps/lib

# -- product: hps itself, in a separate folder ------------------------------------------------------
FROM dependencies AS product
COPY pyproject.toml README.md LICENSE ./
COPY hps hps
COPY services services
# HPS_NATIVE=on: without the compiled core the build fails here, not a server later.
RUN uv build --no-cache --quiet --wheel --no-build-isolation --python /opt/tools/bin/python --out-dir /opt/wheel \
 && uv pip install --no-cache --no-deps --python /opt/hps/bin/python --prefix /opt/product /opt/wheel/*.whl \
 && python3 -m compileall -q -j 0 --invalidation-mode unchecked-hash -s /opt/product -p /opt/hps /opt/product/lib \
 && cp -a /opt/product/. /opt/hps/ \
 && HPS_NATIVE=on /opt/hps/bin/python -I -c 'import hps.native'

# -- runtime: Python and a user -----------------------------------------------------------------------
FROM ${BASE} AS runtime
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="hps" \
      org.opencontainers.image.description="Inference parameter server: embedding tables larger than a GPU, served at low latency" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.documentation="docs/containers.md" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
# Group 0 may write what the user may: platforms that give each container another user keep that group.
RUN useradd --uid 10001 --gid 0 --no-create-home --home-dir /var/lib/hps --shell /usr/sbin/nologin hps \
 && mkdir -p /var/lib/hps/models /var/lib/hps/rocksdb /var/lib/hps/triton /etc/hps \
 && chown -R 10001:0 /var/lib/hps \
 && chmod -R g=u /var/lib/hps
# HOME: where libraries may keep what they compile; the rest may be read-only.
ENV PATH=/opt/hps/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HPS_CONFIG=/etc/hps/config.yaml \
    HOME=/tmp
WORKDIR /var/lib/hps
USER 10001:0
# HTTP, gRPC, administration with health and metrics
EXPOSE 8000 8001 8002
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=15s --timeout=5s --start-period=120s --retries=3 CMD ["hps", "healthcheck"]
ENTRYPOINT ["hps"]
CMD ["serve"]

# What hps needs comes first, in a separate layer: another version of hps is some MB to pull.
FROM runtime AS gpu
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=dependencies-gpu /opt/hps /opt/hps
COPY --from=product /opt/product /opt/hps

# The default target.
FROM runtime AS cpu
COPY --from=dependencies /opt/hps /opt/hps
COPY --from=product /opt/product /opt/hps
