// C functions that call CUB's histogram, scan and sums of rows, for cub_test.py. Compiled by nvcc,
// not by the plugin.

#include <cub/device/device_histogram.cuh>
#include <cub/device/device_scan.cuh>
#include <cub/device/device_segmented_reduce.cuh>
#include <thrust/iterator/counting_iterator.h>
#include <thrust/iterator/transform_iterator.h>

// Each returns a cudaError_t. If temporary is nullptr, it only sets `bytes` to the size it needs.

extern "C" int histogram(void* temporary, size_t* bytes, const int* x, int* out, int n,
                         cudaStream_t stream) {
  return cub::DeviceHistogram::HistogramEven(temporary, *bytes, x, out, 257, 0, 256, n, stream);
}

extern "C" int inclusive_sum(void* temporary, size_t* bytes, const int* x, int* out, int n,
                             cudaStream_t stream) {
  return cub::DeviceScan::InclusiveSum(temporary, *bytes, x, out, n, stream);
}

// Where row `r` begins, in elements. Row r ends where the next one begins.
struct Begin {
  long long n;
  __host__ __device__ long long operator()(long long r) const { return r * n; }
};

extern "C" int row_sums(void* temporary, size_t* bytes, const int* x, int* out, int rows, int n,
                        cudaStream_t stream) {
  auto begins = thrust::make_transform_iterator(thrust::counting_iterator<long long>(0), Begin{n});
  return cub::DeviceSegmentedReduce::Sum(temporary, *bytes, x, out, rows, begins, begins + 1,
                                         stream);
}
