# The images of routers and workers; docs/docker.md.
#   docker build --target router .
#   docker build --target worker [--build-arg VARIANT=cuda] .

# Debian or like it, with Python 3.11 or newer; for CUDA also with Python's headers.
ARG PYTHON=python:3.11-slim-bookworm
# Where things are built: the same system, with what it may need besides to reach your package registries, such as a
# certificate. Nothing of it gets into the images.
ARG BUILD_PYTHON=${PYTHON}
ARG VARIANT=cpu

FROM ${BUILD_PYTHON} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
# pip in a folder of its own stays behind.
RUN python3 -m venv /pip && python3 -m venv --without-pip /opt/pdserve
ENV PIP="/pip/bin/pip --python /opt/pdserve/bin/python"
WORKDIR /src
# Removes packages' own tests, and the bytecode of models, of which a process loads one at most. The other bytecode
# stays: it halves the time to start, and containers cannot write it.
RUN printf '%s\n' 'set -eu' \
        'cd /opt/pdserve/lib/python3.*/site-packages' \
        'find . -depth -type d -name tests ! -path "./numpy/*" -exec rm -r {} +' \
        'rm -r transformers/models/*/__pycache__' > /prune

# By themselves, so that only a change of these, and none of the code, installs them anew.
FROM build AS requirements
COPY pyproject.toml ./
RUN for extra in router engine tracing; do \
        python3 -c "import sys, tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
            print(*p['dependencies'], *p['optional-dependencies'][sys.argv[1]], sep='\n')" $extra > $extra.txt; \
    done

FROM build AS code
COPY . .
RUN $PIP install --no-deps --prefix /code .

# What the images have in common.
FROM ${PYTHON} AS runtime
RUN useradd --uid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin pdserve
# Caches go below HOME: all that has to be writable is /tmp.
ENV HOME=/tmp \
    PATH=/opt/pdserve/bin:$PATH \
    PDSERVE_HOST=0.0.0.0 \
    PDSERVE_METRICS_PORT=9090 \
    PDSERVE_MODEL=/models/pdserve-tiny
ARG VERSION=0.1.0
LABEL org.opencontainers.image.description="Serves large language models with prefill and decode on separate services" \
      org.opencontainers.image.licenses=Apache-2.0 \
      org.opencontainers.image.version=${VERSION}
STOPSIGNAL SIGTERM
# /ready is the process's gRPC health, also where gRPC speaks TLS.
HEALTHCHECK --interval=5s --timeout=5s --start-period=10m --retries=2 CMD ["python", "-Ic", \
    "import os, urllib.request as u; u.urlopen('http://127.0.0.1:%s/ready' % os.environ['PDSERVE_METRICS_PORT'])"]
WORKDIR /tmp
USER 10001:10001

FROM build AS router-requirements
COPY --from=requirements /src/router.txt /src/tracing.txt ./
COPY constraints.txt ./
RUN $PIP install -c constraints.txt -r router.txt -r tracing.txt && sh /prune

FROM runtime AS router
LABEL org.opencontainers.image.title=pdserve-router
COPY --from=router-requirements /opt/pdserve /opt/pdserve
COPY models/pdserve-tiny/*.json /models/pdserve-tiny/
COPY --from=code /code /opt/pdserve
EXPOSE 50051 8000 9090
CMD ["pdserve-router"]

FROM build AS worker-requirements
RUN apt-get update && apt-get install -y --no-install-recommends g++
COPY --from=requirements /src/engine.txt /src/tracing.txt ./
COPY constraints.txt ./
ARG VARIANT
# PyPI's torch is the one for CUDA.
RUN if [ $VARIANT = cpu ]; then index="--index-url https://download.pytorch.org/whl/cpu"; fi; \
    $PIP install $index -c constraints.txt torch && $PIP install -c constraints.txt -r engine.txt -r tracing.txt \
    && $PIP install --no-deps -c constraints.txt xgrammar
# NIXL brings its expert parallelism, torch its headers, tests and tools.
RUN sh /prune \
    && cd /opt/pdserve/lib/python3.*/site-packages \
    && rm -rf nixl_ep* torch/include torch/share torch/test \
    && find torch/bin -type f ! -name torch_shm_manager -delete

FROM worker-requirements AS kernels
COPY kernels kernels
RUN PYTHONPATH=kernels /opt/pdserve/bin/python -m pdserve_kernels.cpu.build --output /kernels

FROM runtime AS worker-cpu

FROM runtime AS worker-cuda
# Triton compiles a little C for each kernel that it launches.
USER root
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
USER 10001:10001

FROM worker-${VARIANT} AS worker
LABEL org.opencontainers.image.title=pdserve-worker
ENV PDSERVE_PORT=50061 PDSERVE_KERNELS_DIR=/opt/pdserve/kernels
COPY --from=worker-requirements /opt/pdserve /opt/pdserve
COPY models/pdserve-tiny /models/pdserve-tiny
COPY --from=kernels /kernels /opt/pdserve/kernels
COPY --from=code /code /opt/pdserve
EXPOSE 50061 9090
CMD ["pdserve-decode"]
