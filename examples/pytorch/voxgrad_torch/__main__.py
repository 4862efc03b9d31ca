"""python -m voxgrad_torch --cmake-dir prints the folder in which CMake's find_package(voxgrad) finds the library."""

import argparse
import os
import sys

parser = argparse.ArgumentParser(prog="python -m voxgrad_torch", description="Prints paths of the installed package.")
group = parser.add_mutually_exclusive_group(required=True)
group.add_argument("--cmake-dir", action="store_true", help="the folder for voxgrad_DIR or CMAKE_PREFIX_PATH")
group.add_argument("--include-dir", action="store_true", help="the folder of voxgrad.h")
group.add_argument("--version", action="store_true", help="the version of voxgrad")
arguments = parser.parse_args()

folder = os.path.dirname(os.path.abspath(__file__))
if arguments.version:
    from . import __version__
    print(__version__)
    sys.exit()
path = os.path.join(folder, "lib", "cmake", "voxgrad") if arguments.cmake_dir else os.path.join(folder, "include")
if not os.path.isdir(path):
    sys.exit(f"voxgrad_torch: this installation has no {path}")
print(path)
