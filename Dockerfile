# Two images: `docker build --target server .` and `docker build --target worker .`
# Neither holds a secret, runs as root, or writes anywhere but to /data and /tmp.
ARG BASE=python:3.11-slim-bookworm

# What both are made of: the lists of their dependencies, and the project as a wheel. A change of the sources alone
# leaves the lists as they are, and then nothing is downloaded anew.
FROM ${BASE} AS package
COPY pyproject.toml README.md LICENSE /src/
RUN python3 -c "import tomllib; \
project = tomllib.load(open('/src/pyproject.toml', 'rb'))['project']; \
extras = project['optional-dependencies']; \
lists = {'server': ['metrics', 'tensorboard'], 'worker': ['tensorflow-cpu', 'datasets']}; \
[open(f'/{role}.txt', 'w').write('\n'.join(sum((extras[name] for name in names), project['dependencies']))) \
for role, names in lists.items()]"
COPY protocol /src/protocol
COPY ps /src/ps
COPY worker /src/worker
RUN python3 -m pip wheel --no-cache-dir --disable-pip-version-check --no-deps --wheel-dir /wheels /src

FROM ${BASE} AS server
RUN groupadd --gid 10001 weighmaster \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin weighmaster \
 && install --directory --mode 0700 --owner 10001 --group 10001 /data \
 && python3 -m venv --without-pip /opt/weighmaster
COPY --from=package /server.txt /requirements.txt
RUN python3 -m pip --python /opt/weighmaster/bin/python3 install \
    --no-cache-dir --disable-pip-version-check -r /requirements.txt
COPY --from=package /wheels /wheels
RUN python3 -m pip --python /opt/weighmaster/bin/python3 install \
    --no-cache-dir --disable-pip-version-check --no-deps /wheels/*.whl
# Compiled kernels lie on the volume: a server that comes back need not compile them again.
ENV PATH=/opt/weighmaster/bin:$PATH PYTHONUNBUFFERED=1 HOME=/tmp NUMBA_CACHE_DIR=/data/kernels
USER 10001:10001
WORKDIR /data
EXPOSE 5014 8014
# Whether it listens, by the kernel's table: a connection would be one more caller in the log.
HEALTHCHECK --interval=5s --timeout=3s --start-period=60s --retries=3 \
    CMD grep -qi "$(printf ':%04X [0-9A-F]*:0000 0A ' "${WEIGHMASTER_PORT:-5014}")" /proc/net/tcp /proc/net/tcp6
ENTRYPOINT ["weighmaster-ps"]

# TensorFlow's C++ headers, 300 MB, serve only who compiles ops of his own.
FROM ${BASE} AS worker
RUN groupadd --gid 10001 weighmaster \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin weighmaster \
 && python3 -m venv --without-pip /opt/weighmaster
COPY --from=package /worker.txt /requirements.txt
RUN python3 -m pip --python /opt/weighmaster/bin/python3 install \
    --no-cache-dir --disable-pip-version-check -r /requirements.txt \
 && rm -rf /opt/weighmaster/lib/python3*/site-packages/tensorflow/include
COPY --from=package /wheels /wheels
RUN python3 -m pip --python /opt/weighmaster/bin/python3 install \
    --no-cache-dir --disable-pip-version-check --no-deps /wheels/*.whl
ENV PATH=/opt/weighmaster/bin:$PATH PYTHONUNBUFFERED=1 HOME=/tmp
USER 10001:10001
WORKDIR /tmp
# Whether it is connected to its server. The time to load TensorFlow, and to wait for the server, is no fault.
HEALTHCHECK --interval=5s --timeout=3s --start-period=120s --retries=12 \
    CMD grep -qi "$(printf ' [0-9A-F]*:%04X 01 ' "${WEIGHMASTER_PS##*:}")" /proc/net/tcp /proc/net/tcp6
ENTRYPOINT ["weighmaster-worker"]
