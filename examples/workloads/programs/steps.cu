// The kernel that the CUDA tools examine: it adds one to each word, and with `beyond` also to the word after the last.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda.h>
#include <unistd.h>
#include <vector>

static void check(cudaError_t error, const char *call)
{
    if (error != cudaSuccess) {
        fprintf(stderr, "steps: %s: %s\n", call, cudaGetErrorName(error));
        exit(1);
    }
}

__global__ void step(int *words, int n, int beyond)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;

    if (i < n + beyond)
        words[i]++;
}

int main(int argc, char **argv)
{
    const int n = argc > 1 ? atoi(argv[1]) : 4096, beyond = argc > 2 && !strcmp(argv[2], "beyond");
    std::vector<int> found(n);
    size_t total = 0;
    long sum = 0;
    int *words;
    CUdevice device;

    check(cudaMalloc(&words, n * sizeof(int)), "cudaMalloc");
    check(cudaMemset(words, 0, n * sizeof(int)), "cudaMemset");
    step<<<(n + 256) / 256, 256>>>(words, n, beyond);
    check(cudaGetLastError(), "step");
    check(cudaMemcpy(found.data(), words, n * sizeof(int), cudaMemcpyDeviceToHost), "cudaMemcpy");
    for (int word : found)
        sum += word;
    if (cuDeviceGet(&device, 0) != CUDA_SUCCESS || cuDeviceTotalMem(&total, device) != CUDA_SUCCESS)
        return 1;
    printf("{\"sum\": %ld, \"total\": %zu}\n", sum, total);
    fflush(stdout);
    sleep(1); // so that the launch is counted while the process lives
    return 0;
}
