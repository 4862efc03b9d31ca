// Cases of the losses with class targets, and of kl_div.
#include <cmath>

#include "ops/elementwise.h"
#include "ops/loss.h"
#include "ops/reduce.h"
#include "tests/ops/op_cases.h"

namespace voxgrad::optest {
namespace {

/// Applies the reduction to the losses of all elements.
Array reduced(const Array& losses, Reduction reduction) {
  if (reduction == Reduction::none) return losses;
  const Array total = reference::reduce(losses, {}, false, reference::sum);
  const double count = reduction == Reduction::mean        ? static_cast<double>(losses.values.size())
                       : reduction == Reduction::batchmean ? static_cast<double>(losses.size(0))
                                                           : 1;
  return reference::map(total, total, [count](double v, double) { return v / count; });
}

Dims with_class(Dims voxel, int64_t c) {
  voxel.insert(1, c);
  return voxel;
}

/// Computes cross_entropy by the definition in PyTorch's documentation. `logs` (N, C, ...) holds log-probabilities and
/// `target` (N, ...) class indices.
Array cross_entropy_reference(const Array& logs, const Array& target, const Array* weight,
                              const CrossEntropyOptions& o) {
  const int64_t classes = logs.size(1);
  const auto factor = [&](int64_t c) { return weight ? weight->values[static_cast<size_t>(c)] : 1; };
  double counted = 0;
  const Array losses = reference::build(target.shape, [&](const Dims& i) {
    const auto label = static_cast<int64_t>(target(i));
    if (label == o.ignore_index) return 0.0;
    counted += factor(label);
    double loss = 0;
    for (int64_t c = 0; c < classes; ++c) {
      const double share = (c == label ? 1 - o.label_smoothing : 0) + o.label_smoothing / static_cast<double>(classes);
      loss -= factor(c) * share * logs(with_class(i, c));
    }
    return loss;
  });
  if (o.reduction != Reduction::mean) return reduced(losses, o.reduction);
  const Array total = reduced(losses, Reduction::sum);
  return reference::map(total, total, [counted](double v, double) { return v / counted; });
}

/// Computes cross_entropy for a target (N, C, ...) of class probabilities.
Array soft_cross_entropy_reference(const Array& logs, const Array& target, const Array* weight,
                                   const CrossEntropyOptions& o) {
  Shape voxels = logs.shape;
  voxels.erase(1);
  return reduced(reference::build(voxels,
                                  [&](const Dims& i) {
                                    double loss = 0;
                                    for (int64_t c = 0; c < logs.size(1); ++c) {
                                      const Dims at = with_class(i, c);
                                      const double share = target(at) * (1 - o.label_smoothing) +
                                                           o.label_smoothing / static_cast<double>(logs.size(1));
                                      loss -= (weight ? weight->values[static_cast<size_t>(c)] : 1) * share * logs(at);
                                    }
                                    return loss;
                                  }),
                 o.reduction);
}

/// Computes the Dice loss of probabilities p and targets t, both (N, C, ...). Ignores voxels where `counted` (N, ...)
/// is zero.
Array dice_reference(const Array& p, const Array& t, const Array& counted, const DiceOptions& o) {
  const int64_t first = o.include_background ? 0 : 1, samples = o.batch ? 1 : p.size(0);
  Array products{{samples, p.size(1) - first}, {}}, sums;
  products.values.resize(static_cast<size_t>(samples * (p.size(1) - first)));
  sums = products;
  reference::build(p.shape, [&](const Dims& i) {
    Dims voxel = i;
    voxel.erase(1);
    if (counted(voxel) == 0 || i[1] < first) return 0.0;
    const Dims at{o.batch ? 0 : i[0], i[1] - first};
    products(at) += p(i) * t(i);
    sums(at) += o.squared_pred ? p(i) * p(i) + t(i) * t(i) : p(i) + t(i);
    return 0.0;
  });
  return reduced(
      reference::map(products, sums, [&](double b, double a) { return 1 - (2 * b + o.smooth_nr) / (a + o.smooth_dr); }),
      o.reduction);
}

Array one_hot(const Array& target, int64_t classes) {
  Shape shape = target.shape;
  shape.insert(1, classes);
  return reference::build(shape, [&](const Dims& i) {
    Dims voxel = i;
    voxel.erase(1);
    return static_cast<int64_t>(target(voxel)) == i[1] ? 1.0 : 0.0;
  });
}
/// Returns 0 for voxels of the class `ignored` and 1 for all others.
Array counted_mask(const Array& target, int64_t ignored) {
  return reference::map(target, target,
                        [=](double c, double) { return static_cast<int64_t>(c) == ignored ? 0.0 : 1.0; });
}

struct Variant {
  std::string suffix;
  CrossEntropyOptions options;
  bool weighted = false;
  DType target = i64;
};

std::vector<Variant> cross_entropy_variants() {
  return {{"", {}},
          {"_weighted", {}, true, u8},
          {"_ignoring", {.ignore_index = 1}, false, i32},
          {"_smooth", {.label_smoothing = 0.3}},
          {"_weighted_ignoring_smooth", {.ignore_index = 2, .label_smoothing = 0.2}, true}};
}
constexpr std::pair<const char*, Reduction> kReductions[] = {{"_mean", Reduction::mean},
                                                             {"_sum", Reduction::sum},
                                                             {"_none", Reduction::none},
                                                             {"_batchmean", Reduction::batchmean}};

void add_cross_entropies(std::vector<OpCase>& cases) {
  const std::pair<const char*, Shape> shapes[] = {{"volume", {2, 3, 2, 1, 2}}, {"matrix", {4, 3}}};
  for (const Variant& variant : cross_entropy_variants())
    for (const auto& [ending, reduction] : kReductions)
      for (const auto& [what, shape] : shapes)
        for (const bool logits : {true, false}) {
          CrossEntropyOptions o = variant.options;
          o.reduction = reduction;
          if (!logits && o.label_smoothing > 0) continue;
          Shape voxels = shape;
          voxels.erase(1);
          OpCase c{concat(logits ? "cross_entropy_" : "nll_loss_", what, variant.suffix, ending),
                   [=, as = variant.target](const Tensors& t) {
                     CrossEntropyOptions given = o;
                     if (t.size() > 2) given.weight = t[2];
                     const Tensor target = t[1].to(as);
                     return logits ? cross_entropy(t[0], target, given)
                                   : nll_loss(t[0], target, {given.weight, given.ignore_index, given.reduction});
                   },
                   {{shape}, {voxels, Domain::index, 3}}};
          if (variant.weighted) c.inputs.push_back({{3}, Domain::positive});
          c.reference = [=](const Arrays& a) {
            return cross_entropy_reference(logits ? reference::softmax(a[0], 1, true) : a[0], a[1],
                                           a.size() > 2 ? &a[2] : nullptr, o);
          };
          if (!variant.weighted && reduction == Reduction::sum) c.edges = {{{0, 3, 2}, {0, 2}}, {{2, 3, 0}, {2, 0}}};
          cases.push_back(c);
        }
  for (const auto& [ending, reduction] : kReductions)
    for (const double smoothing : {0.0, 0.3}) {
      const CrossEntropyOptions o{.label_smoothing = smoothing, .reduction = reduction};
      OpCase c{concat("cross_entropy_soft", smoothing > 0 ? "_smooth" : "", ending),
               [=](const Tensors& t) {
                 CrossEntropyOptions given = o;
                 given.weight = t[2];
                 return cross_entropy(t[0], t[1], given);
               },
               {{{2, 3, 2, 2}}, {{2, 3, 2, 2}, Domain::unit}, {{3}, Domain::positive}}};
      c.reference = [=](const Arrays& a) {
        return soft_cross_entropy_reference(reference::softmax(a[0], 1, true), a[1], &a[2], o);
      };
      cases.push_back(c);
    }
}

/// Adds cases with numbers of classes that the class_sums kernels support, and with more classes.
void add_many_classes(std::vector<OpCase>& cases) {
  for (const int64_t classes : {1, 2, 7, 16, 17, 37}) {
    const CrossEntropyOptions o{.label_smoothing = 0.1};
    OpCase c{concat("cross_entropy_of_", classes, "_classes"),
             [=](const Tensors& t) { return cross_entropy(t[0], t[1], o); },
             {{{2, classes, 3}}, {{2, 3}, Domain::index, classes}}};
    c.reference = [=](const Arrays& a) {
      return cross_entropy_reference(reference::softmax(a[0], 1, true), a[1], nullptr, o);
    };
    cases.push_back(c);
    if (classes == 1) continue;  // dice_loss rejects a single class
    c.name = concat("dice_of_", classes, "_classes");
    c.function = [](const Tensors& t) { return dice_loss(t[0], t[1], {.squared_pred = true}); };
    c.reference = [=](const Arrays& a) {
      return dice_reference(reference::softmax(a[0], 1, false), one_hot(a[1], classes), counted_mask(a[1], -1),
                            {.squared_pred = true});
    };
    cases.push_back(c);
  }
}

std::vector<std::pair<std::string, DiceOptions>> dice_variants() {
  return {{"", {}},
          {"_batch", {.batch = true}},
          {"_no_background", {.include_background = false, .smooth_nr = 0, .smooth_dr = 0.5}},
          {"_squared", {.batch = true, .squared_pred = true, .reduction = Reduction::sum}},
          {"_ignoring", {.ignore_index = 2, .reduction = Reduction::none}},
          {"_ignoring_squared", {.squared_pred = true, .ignore_index = 0}}};
}

void add_dice(std::vector<OpCase>& cases) {
  for (const auto& [suffix, options] : dice_variants())
    for (const bool logits : {true, false})
      for (const bool soft : {false, true}) {
        DiceOptions o = options;
        o.softmax = logits;
        if (soft) o.ignore_index = -1;
        const Shape shape{2, 3, 2, 1, 2};
        OpCase c{concat("dice", suffix, logits ? "" : "_of_probabilities", soft ? "_soft" : ""),
                 [=](const Tensors& t) { return dice_loss(t[0], t[1], o); },
                 {{shape, logits ? Domain::any : Domain::unit},
                  soft ? Input{shape, Domain::unit} : Input{{2, 2, 1, 2}, Domain::index, 3}}};
        c.reference = [=](const Arrays& a) {
          const Array p = logits ? reference::softmax(a[0], 1, false) : a[0];
          const Array t = soft ? a[1] : one_hot(a[1], 3);
          const Array counted =
              soft ? reference::reduce(a[1], {1}, false, [](const std::vector<double>&) { return 1.0; })
                   : counted_mask(a[1], o.ignore_index);
          return dice_reference(p, t, counted, o);
        };
        if (!soft) c.edges = {{{1, 3, 1}, {1, 1}}, {{3, 3}, {3}}};
        if (o.batch && !soft) c.edges.push_back({{0, 3, 2}, {0, 2}});
        cases.push_back(c);
      }
}

/// Computes dice_ce_loss of logits. `target` holds class indices or, if `soft` is true, class probabilities.
Array dice_ce_reference(const Array& logits, const Array& target, const Array* weight, bool soft,
                        const DiceCEOptions& o) {
  const Array p = reference::softmax(logits, 1, false), logs = reference::softmax(logits, 1, true);
  const CrossEntropyOptions ce{{}, o.dice.ignore_index, o.label_smoothing, o.dice.reduction};
  const Array counted = soft ? reference::reduce(target, {1}, false, [](const std::vector<double>&) { return 1.0; })
                             : counted_mask(target, o.dice.ignore_index);
  const Array dice = dice_reference(p, soft ? target : one_hot(target, logits.size(1)), counted, o.dice);
  const Array entropy =
      soft ? soft_cross_entropy_reference(logs, target, weight, ce) : cross_entropy_reference(logs, target, weight, ce);
  return reference::map(dice, entropy, [&](double d, double e) { return o.lambda_dice * d + o.lambda_ce * e; });
}

void add_dice_ce(std::vector<OpCase>& cases) {
  const std::pair<std::string, DiceCEOptions> variants[] = {
      {"", {}},
      {"_batch_smooth", {.dice = {.batch = true, .ignore_index = 0}, .label_smoothing = 0.2, .lambda_ce = 0.5}},
      {"_sum", {.dice = {.include_background = false, .reduction = Reduction::sum}, .lambda_dice = 2}}};
  for (const auto& [suffix, options] : variants)
    for (const bool soft : {false, true}) {
      DiceCEOptions o = options;
      if (soft) o.dice.ignore_index = -1;
      const Shape shape{2, 3, 2, 1, 2};
      OpCase c{concat("dice_ce", suffix, soft ? "_soft" : ""),
               [=](const Tensors& t) {
                 DiceCEOptions given = o;
                 given.weight = t[2];
                 return dice_ce_loss(t[0], t[1], given);
               },
               {{shape},
                soft ? Input{shape, Domain::unit} : Input{{2, 2, 1, 2}, Domain::index, 3},
                {{3}, Domain::positive}}};
      c.reference = [=](const Arrays& a) { return dice_ce_reference(a[0], a[1], &a[2], soft, o); };
      cases.push_back(c);
    }
}

/// Adds a case with three levels, whose weights are 2/3, 1/3 and 0.
void add_deep_supervision(std::vector<OpCase>& cases) {
  const DiceCEOptions o{.dice = {.batch = true}};
  OpCase c{"deep_supervision_loss",
           [=](const Tensors& t) {
             return deep_supervision_loss({t[0], t[1], t[2]}, t[3], o);
           },
           {{{2, 3, 4, 4, 2}}, {{2, 3, 2, 2, 1}}, {{2, 3, 1, 1, 1}}, {{2, 4, 4, 2}, Domain::index, 3}}};
  c.inputs[2].differentiable = false;
  c.roundings = 4;
  c.reference = [=](const Arrays& a) {
    const Array coarse = reference::build({2, 2, 2, 1}, [&](const Dims& i) {
      return a[3]({i[0], 2 * i[1] + 1, 2 * i[2] + 1, 2 * i[3] + 1});
    });
    return reference::map(dice_ce_reference(a[0], a[3], nullptr, false, o),
                          dice_ce_reference(a[1], coarse, nullptr, false, o),
                          [](double fine, double second) { return (2 * fine + second) / 3; });
  };
  cases.push_back(c);
}

void add_kl_div(std::vector<OpCase>& cases) {
  for (const auto& [ending, reduction] : kReductions)
    for (const bool log_target : {false, true}) {
      OpCase c{concat("kl_div", log_target ? "_log_target" : "", ending),
               [=, r = reduction](const Tensors& t) { return kl_div(t[0], t[1], r, log_target); },
               {{{2, 3, 2}}, {{2, 3, 2}, log_target ? Domain::any : Domain::positive}}};
      c.reference = [=, r = reduction](const Arrays& a) {
        return reduced(reference::map(a[0], a[1],
                                      [=](double x, double t) {
                                        return log_target ? std::exp(t) * (t - x) : t * (std::log(t) - x);
                                      }),
                       r);
      };
      cases.push_back(c);
    }
}

}  // namespace

void add_loss_cases(std::vector<OpCase>& cases) {
  add_cross_entropies(cases);
  add_many_classes(cases);
  add_dice(cases);
  add_dice_ce(cases);
  add_deep_supervision(cases);
  add_kl_div(cases);
}

}  // namespace voxgrad::optest
