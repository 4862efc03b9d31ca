// Losses. Each has the input's dtype; of halves it is computed in float32. Pairs have one shape; losses of classes say
// theirs.
#pragma once

#include "../core/tensor.h"

namespace voxgrad {

/// batchmean: the sum over the size of the first axis.
enum class Reduction : uint8_t { mean, sum, none, batchmean };

Tensor mse_loss(const Tensor& input, const Tensor& target, Reduction reduction = Reduction::mean);
Tensor l1_loss(const Tensor& input, const Tensor& target, Reduction reduction = Reduction::mean);
/// Quadratic below `beta`, linear above (Girshick, "Fast R-CNN", 2015).
Tensor smooth_l1_loss(const Tensor& input, const Tensor& target, Reduction reduction = Reduction::mean,
                      double beta = 1.0);
/// Binary cross entropy of sigmoid(input), computed without overflow. Target in [0, 1]. pos_weight, undefined or of a
/// shape that broadcasts to the input's, multiplies the part of the positives: -(pos_weight * target * log(p) +
/// (1 - target) * log(1 - p)). For one weight per channel of (N, C, D, H, W) it is (C, 1, 1, 1).
Tensor binary_cross_entropy_with_logits(const Tensor& input, const Tensor& target,
                                        Reduction reduction = Reduction::mean, const Tensor& pos_weight = {});
/// Kullback-Leibler divergence target * (log(target) - input) of log-probabilities `input`; log_target: target holds
/// logarithms too. Where target is 0, so is the loss.
Tensor kl_div(const Tensor& input, const Tensor& target, Reduction reduction = Reduction::mean,
              bool log_target = false);

// ---- losses of classes: input (N, C, ...), target (N, ...) class numbers in [0, C), of i64, i32 or u8. A number
// outside other than ignore_index throws Error: on the CPU here; on a GPU its voxel is left out, or its loss NaN, and
// the next wait for the device that happens anyway (item(), to(cpu)) throws. Where `target` is floating it holds
// probabilities of input's shape (and ignore_index must be negative, and of no effect).
//
// Sums and means over volumes of up to 12 classes, given by number, read the input once forward and once backward.

struct CrossEntropyOptions {
  Tensor weight{};              ///< (C): factors of the classes, in the mean too: it divides by their sum
  int64_t ignore_index = -100;  ///< voxels of this class count for nothing
  double label_smoothing = 0;   ///< in [0, 1]: the part of a voxel's target that all classes share
  Reduction reduction = Reduction::mean;
};
/// -log(softmax(input)) of the target's class; the input holds logits. The mean is over the voxels that count, and NaN
/// if none does.
Tensor cross_entropy(const Tensor& input, const Tensor& target, const CrossEntropyOptions& options);
Tensor cross_entropy(const Tensor& input, const Tensor& target, Reduction reduction = Reduction::mean);

struct NLLLossOptions {
  Tensor weight{};
  int64_t ignore_index = -100;
  Reduction reduction = Reduction::mean;
};
/// As cross_entropy, of an input that holds logarithms of probabilities. Targets are class numbers only.
Tensor nll_loss(const Tensor& input, const Tensor& target, const NLLLossOptions& options = {});

/// Names are MONAI's.
struct DiceOptions {
  bool softmax = true;             ///< the input holds logits; else probabilities
  bool batch = false;              ///< one coefficient a class, over all samples; else one for each sample and class
  bool include_background = true;  ///< class 0 too
  bool squared_pred = false;       ///< p * p and t * t in the denominator
  double smooth_nr = 1e-5, smooth_dr = 1e-5;
  int64_t ignore_index = -100;
  Reduction reduction = Reduction::mean;  ///< over samples and classes; none: (N, C), or with `batch` (1, C)
};
/// 1 - (2 sum(p t) + smooth_nr) / (sum(p) + sum(t) + smooth_dr), sums over the voxels of each class (Milletari, Navab
/// and Ahmadi, "V-Net", 2016; in this form, with probabilities p, that of nnU-Net: Isensee et al. 2021). Throws Error
/// for softmax over one channel, which is 1 whatever the logits are.
Tensor dice_loss(const Tensor& input, const Tensor& target, const DiceOptions& options = {});

struct DiceCEOptions {
  DiceOptions dice{};  ///< its ignore_index and its reduction, mean or sum, are those of the cross entropy too
  Tensor weight{};     ///< of the cross entropy, as label_smoothing
  double label_smoothing = 0;
  double lambda_dice = 1, lambda_ce = 1;
};
/// lambda_dice * dice_loss + lambda_ce * cross_entropy of logits, in the same passes over them. Differs from the sum of
/// the two functions where no voxel counts, because all are ignored or have a class of weight 0: the cross-entropy is
/// then 0, as in nnU-Net, whereas cross_entropy returns NaN, as in PyTorch. Dice is 0 there if smooth_nr == smooth_dr.
Tensor dice_ce_loss(const Tensor& input, const Tensor& target, const DiceCEOptions& options = {});

/// Deep supervision: dice_ce_loss of logits of several sizes, the largest first (nn::UNet::levels), with weights
/// 1, 1/2, 1/4, ..., of several the last one's 0 and the others' sum 1, as nnU-Net's trainer has them (Isensee et al.
/// 2021). A level's target is every k-th voxel of `target` along each axis, from k / 2 on (nearest_exact): a view.
/// A level whose target has ignored voxels only adds 0. Throws if the sizes of a level, the last one included, do not
/// divide those of the target. Returns dice_ce_loss if there is one level.
Tensor deep_supervision_loss(const Tensors& levels, const Tensor& target, const DiceCEOptions& options = {});

}  // namespace voxgrad
