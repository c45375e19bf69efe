# The released vLLM image with the plugin, its kernels and Ray; nothing of the base is changed. docs/image.md says more.
ARG BASE=vllm/vllm-openai:v0.33.0
ARG VLLM=0.33.0
ARG FLASHINFER=0.7.2.post1
ARG RAY=2.60.0
# "skip" leaves the extension out, and the selfcheck says so.
ARG EXLLAMAV3=1.6.5
ARG CUDA_ARCHS=12.1a

FROM ${BASE} AS build
ARG VLLM
ARG FLASHINFER
ARG EXLLAMAV3
ARG CUDA_ARCHS
# The digest of the checkout as the launcher computed it; empty: not compared.
ARG RECIPE=
# 1: nothing is downloaded, image/wheels has every wheel.
ARG OFFLINE=
# Compilers at once; empty: as many as cores and memory allow.
ARG JOBS=
COPY . /src
RUN python3 /src/launcher/recipe.py --expect "${RECIPE}" && python3 /src/image/base.py take /out/base.json
RUN python3 /src/image/wheels.py /out/base.json /out

# docker build --target wheels --output image/wheels .    keeps the wheels, for a build without a network
FROM scratch AS wheels
COPY --from=build /out/wheels /

FROM ${BASE}
ARG BASE
ARG VLLM
ARG FLASHINFER
ARG RAY
ARG EXLLAMAV3
ARG CUDA_ARCHS
ARG RECIPE=
# sha256:... of BASE, where BASE does not carry it itself; the launcher looks it up.
ARG BASE_DIGEST=
LABEL org.opencontainers.image.title="glm-5.3-flash-exl3" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="${BASE}" \
      org.opencontainers.image.base.digest="${BASE_DIGEST}" \
      exl3.recipe="${RECIPE}" \
      exl3.vllm="${VLLM}" \
      exl3.flashinfer="${FLASHINFER}" \
      exl3.ray="${RAY}" \
      exl3.exllamav3="${EXLLAMAV3}" \
      exl3.architectures="${CUDA_ARCHS}"
RUN --mount=type=bind,from=build,source=/src,target=/src --mount=type=bind,from=build,source=/out,target=/out \
    PYTHONDONTWRITEBYTECODE=1 python3 /src/image/install.py /out/base.json /out
RUN python3 -m vllm_exl3.selfcheck --no-gpu
