// Preprocessed training cases on disk. Patches are read from the files, so the cases need not fit into memory.
#pragma once

#include <filesystem>
#include <vector>

#include <voxgrad.h>

#include "examples/segment/survey.h"
#include "examples/segment/task.h"

namespace segment {

/// Preprocesses the training cases one after another and writes each case to NAME-image.npy and NAME-label.npy in
/// `folder`. Creates the folder if it does not exist. Records checksums of the files, the cases and the preprocessing
/// in contents.txt of this folder. With `reuse`, keeps the existing files of a case if these checksums match. Throws
/// voxgrad::Error, with the name of the file, if a file cannot be written.
///
/// Returns one source per case. A source throws voxgrad::Error if it reads a patch from a missing or damaged file.
std::vector<voxgrad::data::PatchSource> store(const Task& task, const Survey& survey,
                                              const std::filesystem::path& folder, bool reuse);

}  // namespace segment
