use std::collections::HashMap;
use std::error::Error;

use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use safetensors::SafeTensors;

use crate::ffi::{Entry, Header, KeyValue};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

fn dtype_name(dtype: Dtype) -> Result<String> {
    Ok(serde_json::to_value(dtype)?.as_str().unwrap_or_default().to_owned())
}

/// Validates the header of a whole (mapped) file and lists its tensors in the order of their data.
pub fn read_header(file: &[u8]) -> Result<Header> {
    let (length, metadata) = SafeTensors::read_metadata(file)?;
    let mut tensors = Vec::new();
    for name in metadata.offset_keys() {
        let info = metadata.info(&name).ok_or("a tensor without an entry")?;
        tensors.push(Entry {
            dtype: dtype_name(info.dtype)?,
            shape: info.shape.iter().map(|&n| n as u64).collect(),
            begin: info.data_offsets.0 as u64,
            end: info.data_offsets.1 as u64,
            name,
        });
    }
    let mut pairs: Vec<KeyValue> = metadata
        .metadata()
        .iter()
        .flatten()
        .map(|(key, value)| KeyValue { key: key.clone(), value: value.clone() })
        .collect();
    pairs.sort_by(|a, b| a.key.cmp(&b.key));
    Ok(Header { data_start: 8 + length as u64, tensors, metadata: pairs })
}

/// The bytes before the data: length, compact JSON, padding with spaces to a multiple of eight.
pub fn write_header(tensors: &[Entry], metadata: &[KeyValue]) -> Result<Vec<u8>> {
    let mut infos = Vec::with_capacity(tensors.len());
    for entry in tensors {
        let dtype: Dtype = serde_json::from_value(entry.dtype.as_str().into())?;
        let shape = entry.shape.iter().map(|&n| n as usize).collect();
        let data_offsets = (entry.begin as usize, entry.end as usize);
        infos.push((entry.name.clone(), TensorInfo { dtype, shape, data_offsets }));
    }
    let pairs: HashMap<String, String> =
        metadata.iter().map(|pair| (pair.key.clone(), pair.value.clone())).collect();
    let pairs = if pairs.is_empty() { None } else { Some(pairs) };
    let mut json = serde_json::to_vec(&Metadata::new(pairs, infos)?)?;
    json.resize(json.len().next_multiple_of(8), b' ');
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend(json);
    Ok(bytes)
}
