# shellcheck shell=bash
# Sourced by launch/gpu.sh and launch/gpu_check.sh: whether the NVIDIA driver here can carry the jax of the extra `cuda`.
# It looks at the driver alone; whether jax then sees the GPUs is asked of jax.

MIN_DRIVER=525 # the first one for CUDA 12, which the wheels bring along

# Print one line a GPU, "index, name, driver version, memory"; or on stderr what is wrong and what to do, and fail.
find_gpus() {
    local answer gpus driver
    if ! command -v nvidia-smi >/dev/null 2>&1; then
        say "no NVIDIA driver: nvidia-smi was not found; install the driver (Ubuntu: sudo ubuntu-drivers install)," \
            "or run on the CPU with launch/local.sh" >&2
        return 1
    fi
    if ! answer=$(nvidia-smi --query-gpu=index,name,driver_version,memory.total --format=csv,noheader 2>&1); then
        answer=$(printf '%s' "$answer" | tr -s '\n\t ' ' ')
        case $answer in
        *[Vv]ersion\ mismatch*) say "the NVIDIA driver was updated under a running kernel: reboot. nvidia-smi says: $answer" ;;
        *communicate*) say "the NVIDIA driver is installed but not loaded: sudo modprobe nvidia, or reboot. nvidia-smi says: $answer" ;;
        *[Nn]o\ devices*) say "the NVIDIA driver finds no GPU: is one attached to this machine, or given to this container" \
            "(docker run --gpus all)? nvidia-smi says: $answer" ;;
        *) say "nvidia-smi fails: $answer" ;;
        esac >&2
        return 1
    fi
    gpus=$(printf '%s\n' "$answer" | grep -E '^ *[0-9]+,') || gpus=
    if [ -z "$gpus" ]; then
        say "the NVIDIA driver finds no GPU: is one attached to this machine, or given to this container" \
            "(docker run --gpus all)?" >&2
        return 1
    fi
    driver=$(printf '%s\n' "$gpus" | head -n 1 | cut -d, -f3 | tr -d ' ')
    if ! [[ $driver =~ ^[0-9]+ ]] || [ "${driver%%.*}" -lt "$MIN_DRIVER" ]; then
        say "the NVIDIA driver is $driver, and CUDA 12 needs $MIN_DRIVER or newer: update the driver" \
            "(Ubuntu: sudo ubuntu-drivers install) and reboot" >&2
        return 1
    fi
    printf '%s\n' "$gpus"
}
