# Debian packages by CPack, for `./run package`: the shared library, the development files and the programs. The CMake
# option VOXGRAD_PACKAGE includes this file, which needs BUILD_SHARED_LIBS, help2man, gzip and python3.
#
# The library package is named after the SONAME, as Debian's policy demands. The SONAME contains the minor version,
# because until version 1.0 each minor version may change the ABI. A build with CUDA creates packages with the same
# names and a higher version (0.1.0+cuda13.0), so that they replace the packages without CUDA.
if(NOT BUILD_SHARED_LIBS)
  message(FATAL_ERROR "VOXGRAD_PACKAGE needs -DBUILD_SHARED_LIBS=ON")
endif()
set(debian ${CMAKE_CURRENT_LIST_DIR}/debian)
set(soversion ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
set(components voxgrad_library voxgrad_development voxgrad_tools)
set(package_voxgrad_library libvoxgrad${soversion})
set(package_voxgrad_development libvoxgrad-dev)
set(package_voxgrad_tools voxgrad-tools)
# Debian requires an address. This one is a placeholder: the domain .example is reserved (RFC 2606).
set(maintainer "voxgrad maintainers <maintainers@voxgrad.example>")
set(version ${PROJECT_VERSION})
if(VOXGRAD_CUDA)
  string(APPEND version +cuda${CUDAToolkit_VERSION_MAJOR}.${CUDAToolkit_VERSION_MINOR})
endif()

# ---- programs and their man pages. The prefix voxgrad- avoids names of programs in other packages, such as predict.
set(programs segment predict superres)
set(name_segment "train and test a network that segments volumes")
set(name_predict "segment volumes with a model of nnU-Net or of voxgrad-segment")
set(name_superres "train and test a network that increases the resolution of a volume")
set(pages)
foreach(program IN LISTS programs)
  set_target_properties(${program} PROPERTIES OUTPUT_NAME voxgrad-${program})
  set(page ${CMAKE_CURRENT_BINARY_DIR}/man/voxgrad-${program}.1)
  add_custom_command(OUTPUT ${page}.gz DEPENDS ${program}
    COMMAND ${CMAKE_COMMAND} -E env PATH=$<TARGET_FILE_DIR:${program}>:$ENV{PATH} help2man --no-info --section=1
      --name=${name_${program}} --version-string=${version} --source=voxgrad --output=${page} voxgrad-${program}
    COMMAND gzip -9nf ${page})
  list(APPEND pages ${page}.gz)
endforeach()
add_custom_target(man ALL DEPENDS ${pages})
install(TARGETS ${programs} RUNTIME COMPONENT voxgrad_tools)
install(FILES ${pages} DESTINATION ${CMAKE_INSTALL_MANDIR}/man1 COMPONENT voxgrad_tools)

# ---- documentation of each package
string(TIMESTAMP date "%a, %d %b %Y %H:%M:%S +0000" UTC)  # uses SOURCE_DATE_EPOCH
configure_file(${debian}/changelog.in packaging/changelog.Debian @ONLY)
configure_file(CHANGELOG.md packaging/changelog COPYONLY)
execute_process(COMMAND gzip -9nkf changelog.Debian changelog
  WORKING_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/packaging COMMAND_ERROR_IS_FATAL ANY)
set(used)
if(VOXGRAD_MPI)
  list(APPEND used --with mpi)
endif()
if(VOXGRAD_CUDA)
  list(APPEND used --with cuda=${CUDAToolkit_VERSION})
endif()
if(VOXGRAD_NCCL)
  list(APPEND used --with nccl)
endif()
execute_process(COMMAND ${CMAKE_CURRENT_LIST_DIR}/sbom ${version} --built ${used}
  OUTPUT_FILE ${CMAKE_CURRENT_BINARY_DIR}/packaging/voxgrad.spdx.json COMMAND_ERROR_IS_FATAL ANY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/packaging/voxgrad.spdx.json
  DESTINATION share/doc/${package_voxgrad_library} COMPONENT voxgrad_library)
foreach(component IN LISTS components)
  set(package ${package_${component}})
  install(FILES ${debian}/copyright ${CMAKE_CURRENT_BINARY_DIR}/packaging/changelog.Debian.gz
    ${CMAKE_CURRENT_BINARY_DIR}/packaging/changelog.gz DESTINATION share/doc/${package} COMPONENT ${component})
  set(overrides ${debian}/lintian-overrides)
  if(component STREQUAL voxgrad_library)
    list(APPEND overrides ${debian}/lintian-overrides-library)
  endif()
  execute_process(COMMAND cat ${overrides} OUTPUT_VARIABLE overrides COMMAND_ERROR_IS_FATAL ANY)
  file(WRITE ${CMAKE_CURRENT_BINARY_DIR}/packaging/overrides/${package} "${overrides}")
  install(FILES ${CMAKE_CURRENT_BINARY_DIR}/packaging/overrides/${package} DESTINATION share/lintian/overrides
    COMPONENT ${component})
endforeach()

# strip_installed(COMPONENT FILE) strips an installed file and, like dh_strip, removes the sections .comment and .note.
function(strip_installed component file)
  install(CODE "execute_process(COMMAND ${CMAKE_STRIP} --strip-unneeded --remove-section=.comment --remove-section=.note
    \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/${file}\" COMMAND_ERROR_IS_FATAL ANY)" COMPONENT ${component})
endfunction()
strip_installed(voxgrad_library ${CMAKE_INSTALL_LIBDIR}/libvoxgrad.so.${PROJECT_VERSION})
foreach(program IN LISTS programs)
  strip_installed(voxgrad_tools ${CMAKE_INSTALL_BINDIR}/voxgrad-${program})
endforeach()

# ---- CPack
set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_INSTALL_DEFAULT_DIRECTORY_PERMISSIONS
  OWNER_READ OWNER_WRITE OWNER_EXECUTE GROUP_READ GROUP_EXECUTE WORLD_READ WORLD_EXECUTE)
set(CPACK_COMPONENTS_ALL ${components})
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_COMPONENTS_GROUPING ONE_PER_GROUP)
set(CPACK_PACKAGE_NAME voxgrad)
set(CPACK_PACKAGE_VERSION ${version})
set(CPACK_DEBIAN_PACKAGE_RELEASE 1)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_MAINTAINER ${maintainer})
set(CPACK_DEBIAN_PACKAGE_SOURCE voxgrad)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS_PRIVATE_DIRS ${CMAKE_CURRENT_BINARY_DIR})
set(CPACK_DEBIAN_ENABLE_COMPONENT_DEPENDS ON)

# describe(COMPONENT SECTION SUMMARY) sets the fields of a package.
macro(describe component section summary)
  string(TOUPPER ${component} upper)
  set(CPACK_DEBIAN_${upper}_PACKAGE_NAME ${package_${component}})
  set(CPACK_DEBIAN_${upper}_PACKAGE_SECTION ${section})
  set(CPACK_DEBIAN_${upper}_DESCRIPTION "${summary}
voxgrad is a small deep-learning framework in C++20 and CUDA for volumes:
medical images, voxel shapes and simulation fields. Its tensors, autograd,
modules, optimizers and data loaders follow PyTorch.")
endmacro()
describe(voxgrad_library libs "Deep learning on volumes - shared library")
describe(voxgrad_development libdevel "Deep learning on volumes - development files")
describe(voxgrad_tools science "Deep learning on volumes - programs")
configure_file(${debian}/shlibs.in packaging/shlibs @ONLY)
set(CPACK_DEBIAN_VOXGRAD_LIBRARY_PACKAGE_CONTROL_EXTRA
  ${CMAKE_CURRENT_BINARY_DIR}/packaging/shlibs ${debian}/triggers)
set(CPACK_COMPONENT_VOXGRAD_DEVELOPMENT_DEPENDS voxgrad_library)
set(CPACK_COMPONENT_VOXGRAD_TOOLS_DEPENDS voxgrad_library)
set(CPACK_DEBIAN_VOXGRAD_DEVELOPMENT_PACKAGE_DEPENDS zlib1g-dev)  # voxgrad.pc requires zlib.pc
set(CPACK_DEBIAN_VOXGRAD_TOOLS_PACKAGE_RECOMMENDS mricron-data)  # the volumes that the programs use by default
# voxgrad loads NVIDIA's cuBLAS and NCCL at run time, so the package is also useful without these packages.
set(suggested)
if(VOXGRAD_MPI)
  list(APPEND suggested openmpi-bin)
endif()
if(VOXGRAD_CUDA)
  set(CPACK_DEBIAN_VOXGRAD_LIBRARY_PACKAGE_RECOMMENDS
    libcublas-${CUDAToolkit_VERSION_MAJOR}-${CUDAToolkit_VERSION_MINOR})
endif()
if(VOXGRAD_NCCL)
  list(APPEND suggested libnccl2)
endif()
if(suggested)
  list(JOIN suggested ", " CPACK_DEBIAN_VOXGRAD_LIBRARY_PACKAGE_SUGGESTS)
endif()
include(CPack)
