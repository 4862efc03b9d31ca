// Implements the segmentation tasks.
#include "examples/segment/task.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <memory>

#include "examples/common/sample_data.h"
#include "examples/nnunet/dataset_folder.h"
#include "examples/segment/split.h"

namespace segment {
namespace vg = voxgrad;
namespace {

/// Names of structures and their numbers in the AAL atlas: {left, right}.
constexpr std::array<std::pair<const char*, std::array<int, 2>>, 6> kStructures{{{"hippocampus", {37, 38}},
                                                                                 {"amygdala", {41, 42}},
                                                                                 {"caudate", {71, 72}},
                                                                                 {"putamen", {73, 74}},
                                                                                 {"pallidum", {75, 76}},
                                                                                 {"thalamus", {77, 78}}}};
constexpr int kFirstOfCerebellum = 91;  // this and all higher numbers are parts of the cerebellum

/// Maps a number of the AAL atlas to a class: 0 background, 1 other gray matter, 2 to 7 kStructures, 8 cerebellum.
uint8_t class_of(int number) {
  if (number >= kFirstOfCerebellum) return 2 + kStructures.size();
  for (size_t i = 0; i < kStructures.size(); ++i)
    if (number == kStructures[i].second[0] || number == kStructures[i].second[1]) return static_cast<uint8_t>(2 + i);
  return number > 0 ? 1 : 0;
}

/// Loads a volume of Debian's package mricron-data.
Case sample(const char* name) {
  const auto path = examples::find_sample(name);
  vg::check(path.has_value(), "segment", name, " was not found: install Debian's package mricron-data, or pass ",
            "volumes with --image and --label or a folder with --dataset");
  return nnunet::load_case(name, {*path});
}

vg::Tensor classes_of(const vg::Tensor& numbers) {
  vg::Tensor classes = vg::zeros(numbers.shape(), {.dtype = vg::u8});
  const float* from = numbers.data<float>();
  uint8_t* to = classes.mutable_data<uint8_t>();
  for (int64_t i = 0; i < numbers.numel(); ++i) to[i] = class_of(static_cast<int>(from[i]));
  return classes;
}

/// Returns a case with `width` sagittal slices of `head`, starting at slice `first`. With `mirrored`, reverses the
/// order of the slices.
Case half(const std::string& name, const Case& head, const vg::Tensor& classes, int64_t first, int64_t width,
          bool mirrored) {
  const auto part = [&](const vg::Tensor& volume) {
    const vg::Tensor slices = volume.narrow(-1, first, width);
    return (mirrored ? vg::flip(slices, {-1}) : slices).contiguous();
  };
  Case result{name, part(head.image), part(classes), head.geometry};
  result.geometry.shape = result.label.shape();
  for (auto& row : result.geometry.affine) {
    row[3] += row[0] * static_cast<double>(mirrored ? first + width - 1 : first);
    if (mirrored) row[0] = -row[0];
  }
  return result;
}

LazyCase in_memory(const Case& c) {
  return {c.name, [c] { return c; }};
}

void score_all(Task& task) {
  for (int64_t c = 1; c < std::ssize(task.classes); ++c) task.scored.push_back(c);
}

/// Uses the cases with the indices `validation` for validation and the other cases for training.
void split_cases(Task& task, const std::vector<LazyCase>& cases, const std::vector<size_t>& validation) {
  for (size_t i = 0; i < cases.size(); ++i) {
    const bool validates = std::find(validation.begin(), validation.end(), i) != validation.end();
    (validates ? task.validation : task.training).push_back(cases[i]);
  }
  task.validated_on =
      task.validation.size() == 1 ? "case " + task.validation[0].name : vg::concat(task.validation.size(), " cases");
}

/// Uses a slab of the only case for validation and the rest of the case for training.
void split_slices(Task& task, const LazyCase& only) {
  if (task.ignore_index < 0) task.ignore_index = std::ssize(task.classes);
  vg::check(task.ignore_index < 256, "segment", "'", only.name, "' has ", task.classes.size(),
            " classes; at most 255 are supported if there is only one case");
  const std::optional<Slab> slab = find_slab(only.load().label, task.scored);
  vg::check(
      slab.has_value(), "segment", "'", only.name,
      "' is the only case, and no slices of it can be held out for validation, because too few slices contain its "
      "structures; provide a second case");
  const auto with_label = [&](vg::Tensor (*ignore)(const vg::Tensor&, const Slab&, int64_t)) {
    return LazyCase{only.name, [load = only.load, ignore, slab = *slab, ignore_index = task.ignore_index] {
                      Case c = load();
                      c.label = ignore(c.label, slab, ignore_index);
                      return c;
                    }};
  };
  task.training = {with_label(ignore_inside)};
  task.validation = {with_label(ignore_outside)};
  task.validated_on = describe(*slab) + " of " + only.name;
}

/// Returns a case of noise with a brighter ball.
Case ball(uint64_t number) {
  constexpr int64_t kSize = 160, kRadius = 30;
  vg::Generator random(number);
  vg::Tensor distance = vg::zeros({kSize, kSize, kSize});  // squared distance from the center of the ball
  for (int64_t axis = 0; axis < 3; ++axis) {
    vg::Shape shape{1, 1, 1};
    shape[axis] = kSize;
    const auto center = static_cast<double>(kRadius + random.next_below(kSize - 2 * kRadius));
    distance = distance + vg::reshape(vg::pow(vg::arange(0, kSize) - center, 2), shape);
  }
  const vg::Tensor inside = vg::lt(distance, kRadius * kRadius);
  const vg::Tensor noise = vg::randn({kSize, kSize, kSize}, {}, &random);
  Case c{vg::concat("ball-", number), (noise + 10 + inside.to(vg::f32) * 3).unsqueeze(0), inside.to(vg::u8), {}};
  c.geometry.shape = c.label.shape();
  return c;
}

}  // namespace

nnunet::Normalization normalization_of(const std::string& channel) {
  using nnunet::Normalization;
  static const std::map<std::string, Normalization> kByName{{"ct", Normalization::ct},
                                                            {"nonorm", Normalization::none},
                                                            {"rescale_to_0_1", Normalization::rescale_to_0_1},
                                                            {"rescale_0_1", Normalization::rescale_to_0_1},
                                                            {"rgb_to_0_1", Normalization::rgb_to_0_1}};
  std::string name = channel;
  for (char& c : name)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  const auto found = kByName.find(name);
  return found == kByName.end() ? Normalization::z_score : found->second;
}

Task brain() {
  const Case head = sample("ch2.nii.gz"), atlas = sample("aal.nii.gz");
  vg::check(head.geometry.shape == atlas.geometry.shape, "segment", "ch2.nii.gz has shape ", head.geometry.shape,
            ", but aal.nii.gz has ", atlas.geometry.shape);
  const vg::Tensor classes = classes_of(atlas.image.select(0, 0));
  const int64_t width = classes.size(-1), side = width / 2;  // W runs from left to right
  Task task;
  task.name = "seven structures of a brain (ch2, AAL)";
  task.classes = {"background", "other gray matter"};
  for (const auto& [name, numbers] : kStructures) task.classes.emplace_back(name);
  task.classes.emplace_back("cerebellum");
  for (int64_t c = 2; c < std::ssize(task.classes); ++c) task.scored.push_back(c);
  task.channels = {"MRI"};
  const Case left = half("left half", head, classes, 0, side, false);
  split_slices(task, in_memory(left));
  task.predicted.push_back(in_memory(half("right half, mirrored", head, classes, width - side, side, true)));
  task.predicted_as = "test";
  task.baseline.push_back(left.label);
  task.baseline_name = "labels of the left half";
  task.augment.mirror_p = 0;  // mirroring would exchange left and right
  for (auto* intensity_step :
       {&task.augment.noise, &task.augment.blur, &task.augment.brightness, &task.augment.contrast,
        &task.augment.low_resolution, &task.augment.gamma_inverted, &task.augment.gamma})
    intensity_step->p = 0;       // both halves come from the same scan
  task.augment.elastic.p = 0.5;  // the halves differ in shape
  return task;
}

Task dataset(const std::filesystem::path& path) {
  const auto folder = std::make_shared<const nnunet::DatasetFolder>(path);
  vg::check(!folder->training.empty(), "segment", "'", path.string(), "' has no labeled cases");
  Task task;
  task.name = path.filename().empty() ? path.parent_path().filename().string() : path.filename().string();
  task.dataset_json = path / "dataset.json";
  task.classes = folder->classes;
  task.ignore_index = folder->ignore_index;
  task.channels = folder->channels;
  task.in_memory = false;
  score_all(task);
  const auto lazy = [&](const std::vector<std::string>& names) {
    std::vector<LazyCase> cases;
    for (const std::string& name : names) cases.push_back({name, [folder, name] { return folder->load(name); }});
    return cases;
  };
  const std::vector<LazyCase> labeled = lazy(folder->training), unlabeled = lazy(folder->test);
  if (labeled.size() == 1) {
    split_slices(task, labeled[0]);
  } else {
    split_cases(task, labeled, validation_fold(labeled.size()));
    task.validated_on += vg::concat(" (fold 0 of ", std::min<size_t>(labeled.size(), 5), ")");
  }
  task.predicted = task.validation;
  task.predicted_as = "validation";
  task.predicted.insert(task.predicted.end(), unlabeled.begin(), unlabeled.end());
  for (const LazyCase& predicted : task.predicted) predicted.load();  // find errors before the training
  return task;
}

Task files(const std::vector<std::string>& images, const std::vector<std::string>& labels) {
  vg::check(images.size() == labels.size() && !images.empty(), "segment",
            "expected one label per image and at least one image, got ", images.size(),
            images.size() == 1 ? " image" : " images", " and ", labels.size(),
            labels.size() == 1 ? " label" : " labels");
  Task task;
  std::vector<LazyCase> cases;
  int64_t highest = 0;
  for (size_t i = 0; i < images.size(); ++i) {
    const std::string name = std::filesystem::path(images[i]).filename().string();
    cases.push_back(
        {name, [name, image = images[i], label = labels[i]] { return nnunet::load_case(name, {image}, label); }});
    highest = std::max(highest, static_cast<int64_t>(vg::amax(cases.back().load().label.to(vg::i64)).item()));
  }
  task.classes = {"background"};
  for (int64_t c = 1; c <= highest; ++c) task.classes.push_back(vg::concat("class ", c));
  score_all(task);
  task.channels = {"MRI"};
  task.name = cases[0].name;
  if (cases.size() == 1)
    split_slices(task, cases[0]);
  else
    split_cases(task, cases, {cases.size() - 1});
  task.predicted = task.validation;
  task.predicted_as = "validation";
  return task;
}

Task generated() {
  Task task;
  task.name = "generated volumes";
  task.classes = {"background", "ball"};
  task.channels = {"MRI"};
  task.in_memory = false;
  score_all(task);
  for (uint64_t number = 0; number < 4; ++number)
    task.training.push_back({vg::concat("ball-", number), [number] { return ball(number); }});
  task.validation = task.predicted = {task.training[0]};
  task.validated_on = "a training case";
  task.predicted_as = "training";
  return task;
}

vg::data::AugmentOptions in_voxels(vg::data::AugmentOptions options, const std::array<double, 3>& spacing) {
  const double mm = std::cbrt(spacing[0] * spacing[1] * spacing[2]);  // side of a cube with the volume of a voxel
  options.elastic.low /= mm;
  options.elastic.high /= mm;
  options.elastic_spacing /= mm;
  return options;
}

}  // namespace segment
