// Preprocessed training cases on disk. Patches are read from the files, so the cases need not fit into memory.
#pragma once

#include <filesystem>
#include <vector>

#include <voxgrad.h>

#include "examples/segment/preprocess.h"
#include "examples/segment/task.h"

namespace segment {

/// Preprocesses the training cases one by one and writes NAME-image.npy and NAME-label.npy for each. Creates `folder`
/// if it does not exist. contents.txt in this folder records the checksums of the files, of the cases and of the
/// preprocessing. With `reuse`, a case is written again only if these checksums do not match. Throws voxgrad::Error,
/// with the name of the file, if a file cannot be written. Reading a patch throws if the file is missing or damaged.
std::vector<voxgrad::data::PatchSource> store(const Task& task, const Survey& survey,
                                              const std::filesystem::path& folder, bool reuse);

}  // namespace segment
