// The optimizers' steps (ops/optim_step.h), one pass over the parameter and its state.
#include "cuda/kernels.h"
#include "cuda/map.cuh"
#include "ops/optim_step.h"

namespace voxgrad::cuda::kernel {
namespace {

template <class Update, class T, class... State>
__global__ void __launch_bounds__(kBlock)
    update_elements(Update update, int64_t count, T* param, const T* grad, State*... state) {
  for (int64_t i = thread_index(); i < count; i += thread_count()) update(param[i], grad[i], state[i]...);
}

/// `momentum_buffer` and `grad_avg` may be null.
template <class T>
__global__ void __launch_bounds__(kBlock)
    update_rmsprop(RmspropUpdate<T> update, int64_t count, T* param, const T* grad, T* square_avg, T* momentum_buffer,
                   T* grad_avg) {
  for (int64_t i = thread_index(); i < count; i += thread_count())
    update(param[i], grad[i], square_avg[i], momentum_buffer ? momentum_buffer + i : nullptr,
           grad_avg ? grad_avg + i : nullptr);
}

/// Calls body(launch, element of the param's type) if there is anything to do.
template <class F>
void dispatch_step(const char* op, const View& param, const F& body) {
  dispatch_cuda<float, double>(param.dtype, op, [&]<class T>() {
    if (param.numel() == 0) return;
    const Launch launch(param);
    body.template operator()<T>(launch.stream);
    check_launch(op);
  });
}

template <class T>
T* pointer_or_null(const View* view) {
  return view ? view->as<T>() : nullptr;
}

}  // namespace

void sgd(const View& param, const View& grad, const View* momentum, const SgdStep& step) {
  dispatch_step("sgd", param, [&]<class T>(cudaStream_t stream) {
    const int64_t count = param.numel();
    const SgdUpdate<T> update(step);
    if (momentum)
      update_elements<<<grid_size(count), kBlock, 0, stream>>>(update, count, param.as<T>(), grad.as<const T>(),
                                                               momentum->as<T>());
    else
      update_elements<<<grid_size(count), kBlock, 0, stream>>>(update, count, param.as<T>(), grad.as<const T>());
  });
}

void adam(const View& param, const View& grad, const View& exp_avg, const View& exp_avg_sq, const View* max_exp_avg_sq,
          const AdamStep& step) {
  dispatch_step("adam", param, [&]<class T>(cudaStream_t stream) {
    const int64_t count = param.numel();
    const AdamUpdate<T> update(step);
    if (max_exp_avg_sq)
      update_elements<<<grid_size(count), kBlock, 0, stream>>>(update, count, param.as<T>(), grad.as<const T>(),
                                                               exp_avg.as<T>(), exp_avg_sq.as<T>(),
                                                               max_exp_avg_sq->as<T>());
    else
      update_elements<<<grid_size(count), kBlock, 0, stream>>>(update, count, param.as<T>(), grad.as<const T>(),
                                                               exp_avg.as<T>(), exp_avg_sq.as<T>());
  });
}

void rmsprop(const View& param, const View& grad, const View& square_avg, const View* momentum, const View* grad_avg,
             const RmspropStep& step) {
  dispatch_step("rmsprop", param, [&]<class T>(cudaStream_t stream) {
    const int64_t count = param.numel();
    update_rmsprop<<<grid_size(count), kBlock, 0, stream>>>(RmspropUpdate<T>(step), count, param.as<T>(),
                                                            grad.as<const T>(), square_avg.as<T>(),
                                                            pointer_or_null<T>(momentum), pointer_or_null<T>(grad_avg));
  });
}

}  // namespace voxgrad::cuda::kernel
