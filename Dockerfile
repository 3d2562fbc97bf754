# Hearth with all its parts: `docker build -t hearth .`, then `docker run hearth serve --host 0.0.0.0`.
# compose.yaml runs gateways and machines from the same image. gcc is what Triton compiles its launchers with on GPUs.
FROM python:3.12-slim AS build
WORKDIR /build
COPY pyproject.toml README.md ./
COPY gateway gateway
COPY engine engine
COPY prefixcache prefixcache
COPY tenants tenants
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 10001 hearth && install -d -o hearth -g hearth -m 700 /srv/hearth/.hearth
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir /wheels/*.whl && rm -r /wheels
USER hearth
WORKDIR /srv/hearth
VOLUME /srv/hearth/.hearth
EXPOSE 8787
ENTRYPOINT ["hearth"]
CMD ["serve", "--host", "0.0.0.0"]
