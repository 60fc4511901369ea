"""Reading and writing of files: atomic, checked against a schema, and never over a file of the
user.
"""

# An import of a name as itself exports it.
from visavis.core.storage.cache import (
    DamagedCacheError as DamagedCacheError,
    cache_folder as cache_folder,
    file_stats as file_stats,
    modified_ns as modified_ns,
    read_checksummed_json as read_checksummed_json,
    remove_damaged as remove_damaged,
    stat_hash as stat_hash,
    user_folder as user_folder,
    write_checksummed_json as write_checksummed_json,
)
from visavis.core.storage.disk import (
    Disk as Disk,
    current_disk as current_disk,
    replaced_disk as replaced_disk,
)
from visavis.core.storage.folders import (
    create_numbered_folder as create_numbered_folder,
    create_output_folder as create_output_folder,
    folder_lock as folder_lock,
    lock_file as lock_file,
    prepare_empty_folder as prepare_empty_folder,
    remove_folder as remove_folder,
    remove_lock as remove_lock,
    remove_partial_files as remove_partial_files,
    replace_folder as replace_folder,
    require_new_file as require_new_file,
    save_new_file as save_new_file,
    similar_path as similar_path,
)
from visavis.core.storage.outside_folders import (
    IMAGE_ROOTS as IMAGE_ROOTS,
    image_roots as image_roots,
    is_inside as is_inside,
)
from visavis.core.storage.reading import (
    MAX_BYTES as MAX_BYTES,
    RESTORE_COPY as RESTORE_COPY,
    content_hash as content_hash,
    decode_text as decode_text,
    error_reason as error_reason,
    file_kind as file_kind,
    is_transient_error as is_transient_error,
    open_file as open_file,
    open_tensors as open_tensors,
    parse_json as parse_json,
    read_array as read_array,
    read_arrays as read_arrays,
    read_at as read_at,
    read_bytes as read_bytes,
    read_json as read_json,
    read_json_lines as read_json_lines,
    read_tensors as read_tensors,
    read_text as read_text,
    read_toml as read_toml,
    reading_regular_file as reading_regular_file,
    tensor_names as tensor_names,
    tensors_hash as tensors_hash,
    text_encoding as text_encoding,
)
from visavis.core.storage.writing import (
    SQLITE_SECONDS as SQLITE_SECONDS,
    append_json_line as append_json_line,
    atomic_file as atomic_file,
    atomic_folder as atomic_folder,
    cannot_write as cannot_write,
    create_array as create_array,
    create_folder as create_folder,
    disk_full as disk_full,
    move as move,
    resumable as resumable,
    set_toml_value as set_toml_value,
    sqlite_database as sqlite_database,
    sqlite_errors as sqlite_errors,
    storage_errors as storage_errors,
    write_array as write_array,
    write_arrays as write_arrays,
    write_bytes as write_bytes,
    write_json as write_json,
    write_json_lines as write_json_lines,
    write_tensors as write_tensors,
    write_text as write_text,
    write_toml as write_toml,
)
