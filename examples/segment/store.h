// The training cases as files from which patches are read, so that not all of them need to fit into memory.
#pragma once

#include <filesystem>
#include <vector>

#include <voxgrad.h>

#include "examples/segment/preprocess.h"
#include "examples/segment/task.h"

namespace segment {

/// Preprocesses the training cases one by one and writes each as NAME-image.npy and NAME-label.npy in `folder`, which
/// is made if it is not there. With `reuse`, files stay as they are if contents.txt beside them has their checksums,
/// and says that they were made of these cases in this way; others are written anew. Throws voxgrad::Error, with the
/// file's name, where one cannot be written, and on reading a patch of one that is gone or damaged by then.
std::vector<voxgrad::data::PatchSource> store(const Task& task, const Survey& survey,
                                              const std::filesystem::path& folder, bool reuse);

}  // namespace segment
