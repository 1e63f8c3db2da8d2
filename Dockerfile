# The distclip command and library on CPU: docker build -t distclip . && docker run --rm distclip --version
#
# For training on GPUs, install the wheel into the image that you train in instead (`make wheel`).
FROM python:3.11-slim-bookworm AS build
WORKDIR /source
RUN python -m pip install --no-cache-dir "hatchling>=1.26" "build>=1.2"
COPY pyproject.toml README.md LICENSE ./
COPY distclip distclip
COPY launch launch
COPY monitoring monitoring
RUN python -m build --wheel --no-isolation --outdir /wheels

FROM python:3.11-slim-bookworm
COPY constraints.txt /tmp/constraints.txt
COPY --from=build /wheels /tmp/wheels
# PIP_EXTRA_INDEX_URL: an index with CPU builds of torch keeps several GB of CUDA libraries out of the image.
ARG PIP_EXTRA_INDEX_URL
RUN set -- /tmp/wheels/*.whl \
    && python -m pip install --no-cache-dir --constraint /tmp/constraints.txt "$1[cpu,report]" \
    && rm -rf /tmp/wheels /tmp/constraints.txt \
    && useradd --create-home --uid 10001 distclip
COPY tools/healthcheck.py /usr/local/lib/distclip/healthcheck.py
USER distclip
WORKDIR /home/distclip
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s CMD ["python", "/usr/local/lib/distclip/healthcheck.py"]
ENTRYPOINT ["distclip"]
CMD ["--help"]
