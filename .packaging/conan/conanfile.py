"""Conan recipe of voxgrad. It builds the source tree that contains it: conan create .packaging/conan

To use the system's libraries instead of packages of Conan Center, add this section to the profile:

    [platform_requires]
    eigen/3.4.0
    nlohmann_json/3.11.2
    zlib/1.2.13
"""
import pathlib
import re

from conan import ConanFile
from conan.tools.build import check_min_cppstd
from conan.tools.cmake import CMake, CMakeDeps, CMakeToolchain, cmake_layout
from conan.tools.files import copy, rmdir

ROOT = pathlib.Path(__file__).resolve().parents[2]


class Voxgrad(ConanFile):
    name = "voxgrad"
    description = "Deep learning on volumes in C++20 and CUDA"
    license = "Apache-2.0"
    topics = ("deep-learning", "autograd", "medical-imaging", "cuda")
    package_type = "library"
    settings = "os", "arch", "compiler", "build_type"
    options = {"shared": [True, False], "cuda": [True, False], "mpi": [True, False]}
    default_options = {"shared": False, "cuda": False, "mpi": False}  # True: the system's CUDA or MPI

    def set_version(self):
        self.version = re.search(r"^project\(voxgrad VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text(), re.M)[1]

    def export_sources(self):
        for pattern in ("CMakeLists.txt", "LICENSE", "core/*", "ops/*", "cuda/*", "nn/*"):
            copy(self, pattern, ROOT, self.export_sources_folder)

    def requirements(self):
        self.requires("eigen/3.4.0", visible=False)
        self.requires("nlohmann_json/[>=3.10 <4]", visible=False)
        self.requires("zlib/[>=1.2.11 <2]")

    def validate(self):
        check_min_cppstd(self, 20)

    def layout(self):
        cmake_layout(self)

    def generate(self):
        CMakeDeps(self).generate()
        toolchain = CMakeToolchain(self)
        for option in ("TESTS", "EXAMPLES", "BENCH", "C", "NCCL", "NATIVE"):
            toolchain.cache_variables[f"VOXGRAD_{option}"] = False
        toolchain.cache_variables["VOXGRAD_CUDA"] = bool(self.options.cuda)
        toolchain.cache_variables["VOXGRAD_MPI"] = bool(self.options.mpi)
        toolchain.generate()

    def build(self):
        cmake = CMake(self)
        cmake.configure()
        cmake.build()

    def package(self):
        copy(self, "LICENSE", self.source_folder, str(pathlib.Path(self.package_folder) / "licenses"))
        CMake(self).install()
        # Conan generates these files for the projects that use the package.
        for folder in ("cmake", "pkgconfig"):
            rmdir(self, str(pathlib.Path(self.package_folder) / "lib" / folder))

    def package_info(self):
        self.cpp_info.libs = ["voxgrad"]
        self.cpp_info.set_property("cmake_target_name", "voxgrad::voxgrad")
        self.cpp_info.set_property("pkg_config_name", "voxgrad")
        if not self.options.shared:
            self.cpp_info.system_libs = ["pthread", "m", "dl"]
            if "zlib" not in [dependency.ref.name for dependency in self.dependencies.host.values()]:
                self.cpp_info.system_libs += ["z"]  # the profile selects the system's zlib
            if self.options.cuda:
                self.cpp_info.system_libs += ["cudart_static", "rt"]
            if self.options.mpi:
                self.cpp_info.system_libs += ["mpi"]
