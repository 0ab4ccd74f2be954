# Images: --target cpu (the last one, the default), --target cuda, and --target cuda-ray for replicas.
#   docker build --target cuda -t jaxrag:cuda .
#   docker run --rm --gpus all -v "$PWD:/data" -p 8000:8000 jaxrag:cuda serve --kb kb --host 0.0.0.0 --keys keys.toml

FROM python:3.12-slim-bookworm AS wheel
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim-bookworm AS base
ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1 \
    XDG_CACHE_HOME=/data/.cache
RUN useradd --uid 1000 --create-home --home-dir /data jaxrag
COPY constraints.txt /tmp/constraints.txt
WORKDIR /data
EXPOSE 8000
ENTRYPOINT ["jaxrag"]
CMD ["--help"]

# JAX brings the CUDA libraries as wheels; the host needs a driver for CUDA 13 and its container toolkit.
FROM base AS cuda
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install -c /tmp/constraints.txt "$(echo /wheels/*.whl)[serve,documents,cuda]"
USER 1000

# Replicas on a Ray cluster: `jaxrag serve --replicas`, scripts/cluster/kuberay.
FROM cuda AS cuda-ray
USER root
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install -c /tmp/constraints.txt "$(echo /wheels/*.whl)[ray]"
USER 1000

FROM base AS cpu
ENV JAX_PLATFORMS=cpu
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install -c /tmp/constraints.txt "$(echo /wheels/*.whl)[serve,documents]"
USER 1000
