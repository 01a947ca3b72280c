pub fn document(_value: &serde_json::Value) -> Vec<u8> {
    Vec::new()
}
