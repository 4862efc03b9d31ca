// Loss functions. The result has the dtype of the input; losses of bf16 and f16 inputs are computed in float32. Input
// and target must have the same shape, except for the classification losses.
#pragma once

#include "../core/tensor.h"

namespace voxgrad {

/// Reduction of the elementwise losses. batchmean divides the sum by the size of the first axis; none returns the
/// elementwise losses.
enum class Reduction : uint8_t { mean, sum, none, batchmean };

/// Squared error (input - target)^2.
Tensor mse_loss(const Tensor& input, const Tensor& target, Reduction reduction = Reduction::mean);
/// Absolute error |input - target|.
Tensor l1_loss(const Tensor& input, const Tensor& target, Reduction reduction = Reduction::mean);
/// Smooth L1 loss, with d = |input - target|: d^2 / (2 beta) if d < beta, otherwise d - beta / 2 (Girshick, "Fast
/// R-CNN", 2015).
Tensor smooth_l1_loss(const Tensor& input, const Tensor& target, Reduction reduction = Reduction::mean,
                      double beta = 1.0);
/// Binary cross-entropy with p = sigmoid(input): -(pos_weight * target * log(p) + (1 - target) * log(1 - p)). The
/// computation does not overflow. target is in [0, 1]. pos_weight is undefined, which means 1, or has a shape that
/// broadcasts to the shape of the input, for example (C, 1, 1, 1) for one weight per channel of (N, C, D, H, W).
Tensor binary_cross_entropy_with_logits(const Tensor& input, const Tensor& target,
                                        Reduction reduction = Reduction::mean, const Tensor& pos_weight = {});
/// Kullback-Leibler divergence target * (log(target) - input), where input holds log-probabilities. If log_target,
/// target holds log-probabilities too; otherwise, the loss is 0 where target is 0.
Tensor kl_div(const Tensor& input, const Tensor& target, Reduction reduction = Reduction::mean,
              bool log_target = false);

// ---- classification losses
//
// The input is (N, C, ...). The target is either (N, ...) with class indices in [0, C), of dtype i64, i32 or u8, or it
// is floating and holds class probabilities in the shape of the input. With probabilities, ignore_index must be
// negative and has no effect.
//
// A class index outside of [0, C) other than ignore_index causes an Error. On the CPU, the function throws the Error.
// On a GPU, the loss of the voxel is omitted or NaN, and the next operation that waits for the GPU (item(), to(cpu))
// throws the Error.
//
// With class indices, up to 12 classes and reduction mean or sum, the input is read once in the forward pass and once
// in the backward pass.

/// Options of cross_entropy, with the names and defaults of PyTorch.
struct CrossEntropyOptions {
  Tensor weight{};  ///< (C): weights of the classes; the mean is the sum divided by the sum of the voxels' weights
  int64_t ignore_index = -100;  ///< voxels with this class index are ignored
  double label_smoothing = 0;   ///< fraction of the target, in [0, 1], that is distributed equally among all classes
  Reduction reduction = Reduction::mean;
};
/// Cross-entropy -log(softmax(input)) at the class of the target, where input holds logits. The mean is over the voxels
/// that are not ignored. If all voxels are ignored, the mean is NaN.
Tensor cross_entropy(const Tensor& input, const Tensor& target, const CrossEntropyOptions& options);
Tensor cross_entropy(const Tensor& input, const Tensor& target, Reduction reduction = Reduction::mean);

/// See CrossEntropyOptions.
struct NLLLossOptions {
  Tensor weight{};
  int64_t ignore_index = -100;
  Reduction reduction = Reduction::mean;
};
/// Negative log-likelihood: cross_entropy for an input that holds log-probabilities. The target must hold class
/// indices.
Tensor nll_loss(const Tensor& input, const Tensor& target, const NLLLossOptions& options = {});

/// Options of dice_loss, with the names of MONAI.
struct DiceOptions {
  bool softmax = true;             ///< true: the input holds logits; false: probabilities
  bool batch = false;              ///< sum over the batch: one coefficient per class instead of per sample and class
  bool include_background = true;  ///< include class 0
  bool squared_pred = false;       ///< use p * p and t * t in the denominator
  double smooth_nr = 1e-5;         ///< added to the numerator
  double smooth_dr = 1e-5;         ///< added to the denominator
  int64_t ignore_index = -100;     ///< voxels with this class index are ignored
  /// Reduction over samples and classes. `none` returns (N, C), or (1, C) with `batch`.
  Reduction reduction = Reduction::mean;
};
/// Dice loss 1 - (2 sum(p t) + smooth_nr) / (sum(p) + sum(t) + smooth_dr) of probabilities p and target t, where the
/// sums are over the voxels of each class (Milletari, Navab and Ahmadi, "V-Net", 2016; nnU-Net uses this form, Isensee
/// et al. 2021). Throws Error for softmax over one channel, which would always be 1.
Tensor dice_loss(const Tensor& input, const Tensor& target, const DiceOptions& options = {});

/// Options of dice_ce_loss and deep_supervision_loss. lambda_dice and lambda_ce are the weights of the two losses.
struct DiceCEOptions {
  DiceOptions dice{};          ///< ignore_index and reduction (mean or sum) also apply to the cross-entropy
  Tensor weight{};             ///< class weights (C) of the cross-entropy
  double label_smoothing = 0;  ///< label smoothing of the cross-entropy
  double lambda_dice = 1;
  double lambda_ce = 1;
};
/// Returns lambda_dice * dice_loss + lambda_ce * cross_entropy of logits. Both losses are computed in the same passes
/// over the input. If all voxels are ignored or have a class of weight 0, the cross-entropy term is 0, as in nnU-Net.
/// (The function cross_entropy returns NaN in this case, as in PyTorch.) If all voxels are ignored and
/// smooth_nr == smooth_dr > 0, the Dice term is 0, too.
Tensor dice_ce_loss(const Tensor& input, const Tensor& target, const DiceCEOptions& options = {});

/// Deep supervision as in nnU-Net's trainer (Isensee et al. 2021): the weighted sum of dice_ce_loss over logits of
/// several sizes, the largest first (nn::UNet::levels). The weights are proportional to 1, 1/2, 1/4, ..., except for
/// the last level, whose weight is 0; their sum is 1. With one level, the weight is 1. If a level is k times smaller
/// than `target` along an axis, its target is a view of every k-th voxel along this axis, starting at k / 2
/// (nearest_exact). A level whose voxels are all ignored contributes 0. Throws Error if the sizes of a level, including
/// the last, do not divide those of the target.
Tensor deep_supervision_loss(const Tensors& levels, const Tensor& target, const DiceCEOptions& options = {});

}  // namespace voxgrad
