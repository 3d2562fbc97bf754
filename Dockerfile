# Hearth with all its parts: `make image`, then `docker run -p 8787:8787 hearth:local`. compose.yaml runs gateways and
# machines from the same image.
#
#   docker build --build-arg TORCH=cpu .     for CPUs: 1 GB
#   docker build --build-arg TORCH=cuda .    for NVIDIA GPUs: PyTorch with CUDA, and gcc, by which Triton makes launchers
ARG TORCH=cpu

FROM python:3.12-slim AS build
WORKDIR /build
COPY pyproject.toml README.md LICENSE ./
COPY gateway gateway
COPY engine engine
COPY prefixcache prefixcache
COPY tenants tenants
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim AS torch-cpu
RUN pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu 'torch>=2.11,<2.14'

FROM python:3.12-slim AS torch-cuda
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir 'torch>=2.11,<2.14'

FROM torch-${TORCH}
RUN useradd --create-home --uid 10001 hearth && install -d -o hearth -g hearth -m 700 /srv/hearth/.hearth
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir /wheels/*.whl && rm -r /wheels
USER hearth
WORKDIR /srv/hearth
VOLUME /srv/hearth/.hearth
EXPOSE 8787
ENTRYPOINT ["hearth"]
CMD ["serve", "--host", "0.0.0.0"]
