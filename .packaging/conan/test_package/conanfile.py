"""Builds and runs tests/consumer with the package of the recipe."""
import os
import pathlib

from conan import ConanFile
from conan.tools.build import can_run
from conan.tools.cmake import CMake, cmake_layout

CONSUMER = pathlib.Path(__file__).resolve().parents[3] / "tests" / "consumer"


class VoxgradTest(ConanFile):
    settings = "os", "arch", "compiler", "build_type"
    generators = "CMakeDeps", "CMakeToolchain"

    def requirements(self):
        self.requires(self.tested_reference_str)

    def layout(self):
        cmake_layout(self)

    def build(self):
        cmake = CMake(self)
        cmake.configure(build_script_folder=str(CONSUMER))
        cmake.build(target="consumer")

    def test(self):
        if can_run(self):
            self.run(os.path.join(self.cpp.build.bindir, "consumer"), env="conanrun")
