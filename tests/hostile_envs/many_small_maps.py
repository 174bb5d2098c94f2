# Maps very many small regions far apart, so that the kernel's tables of them take more than the memory itself. RIGHT: env_error|worker_died|timeout|denied
import mmap


class ManySmallMapsEnv:
    def reset(self, seed=None):
        return "start", {}

    def step(self, action):
        regions = []
        while True:
            region = mmap.mmap(-1, 4096)
            region[0] = 1
            regions.append(region)
