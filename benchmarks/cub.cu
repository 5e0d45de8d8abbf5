// CUB's histogram and scan behind C functions, for cub_test.py. Compiled by nvcc, not by the plugin.

#include <cub/device/device_histogram.cuh>
#include <cub/device/device_scan.cuh>

// Each returns a cudaError_t; with temporary = nullptr they only set `bytes` to what they need.

extern "C" int histogram(void* temporary, size_t* bytes, const int* x, int* out, int n,
                         cudaStream_t stream) {
  return cub::DeviceHistogram::HistogramEven(temporary, *bytes, x, out, 257, 0, 256, n, stream);
}

extern "C" int inclusive_sum(void* temporary, size_t* bytes, const int* x, int* out, int n,
                             cudaStream_t stream) {
  return cub::DeviceScan::InclusiveSum(temporary, *bytes, x, out, n, stream);
}
