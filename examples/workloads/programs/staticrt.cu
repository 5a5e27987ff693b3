// Tests the CUDA runtime linked with -cudart static: kernels, stream-ordered memory, a refused allocation.
#include <cstdio>
#include <cstdlib>
#include <vector>

static void check(cudaError_t error, const char *call)
{
    if (error != cudaSuccess) {
        fprintf(stderr, "staticrt: %s: %s\n", call, cudaGetErrorName(error));
        exit(1);
    }
}

__global__ void add_one(int *words, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;

    if (i < n)
        words[i]++;
}

int main(int argc, char **argv)
{
    const int n = 1 << 20, rounds = argc > 1 ? atoi(argv[1]) : 1;
    std::vector<int> found(n);
    size_t free_bytes, total;
    int *words, runtime, smallest, largest;
    void *too_much = nullptr;
    cudaStream_t stream;

    check(cudaStreamCreate(&stream), "cudaStreamCreate");
    check(cudaMallocAsync(&words, n * sizeof(int), stream), "cudaMallocAsync");
    check(cudaMemsetAsync(words, 0, n * sizeof(int), stream), "cudaMemsetAsync");
    for (int i = 0; i < rounds; i++) {
        add_one<<<(n + 255) / 256, 256, 0, stream>>>(words, n);
        check(cudaGetLastError(), "add_one");
    }
    check(cudaMemcpyAsync(found.data(), words, n * sizeof(int), cudaMemcpyDeviceToHost, stream), "cudaMemcpyAsync");
    check(cudaFreeAsync(words, stream), "cudaFreeAsync");
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    smallest = largest = found[0];
    for (int word : found) {
        smallest = word < smallest ? word : smallest;
        largest = word > largest ? word : largest;
    }
    check(cudaMemGetInfo(&free_bytes, &total), "cudaMemGetInfo");
    check(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion");
    printf("{\"total\": %zu, \"runtime\": %d, \"smallest\": %d, \"largest\": %d, \"too_much\": \"%s\"}\n", total, runtime,
           smallest, largest, cudaGetErrorName(cudaMalloc(&too_much, 2 * total)));
    fflush(stdout);
    // The process waits until its input ends, so that its launches can be counted.
    while (getchar() != EOF)
        ;
    return 0;
}
