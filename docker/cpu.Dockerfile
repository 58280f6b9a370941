# specjax on CPUs, from a wheel of this checkout:
#   docker build -f docker/cpu.Dockerfile -t specjax .
#   docker run --rm specjax run
FROM python:3.11-slim AS build
WORKDIR /src
COPY . .
RUN pip install --no-cache-dir hatchling hatch-fancy-pypi-readme
RUN python -m hatchling build -t wheel -d /dist

FROM python:3.11-slim
# specjax compiles its CPU kernel at its first use.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
COPY constraints.txt /tmp/constraints.txt
COPY --from=build /dist /dist
RUN pip install --no-cache-dir -c /tmp/constraints.txt "$(ls /dist/*.whl)[serve,gguf]"
RUN useradd --create-home specjax
USER specjax
WORKDIR /home/specjax
ENTRYPOINT ["specjax"]
CMD ["--help"]
