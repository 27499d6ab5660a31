{{/* Certificates, for Pods that mount them, and API keys. */}}

{{- define "pdserve.hasTls" -}}
{{ ne .Values.tls.source "none" | ternary "true" "" }}
{{- end }}

{{/* Name in everybody's certificate: workers are dialled by their Pods' addresses, which no certificate has. */}}
{{- define "pdserve.tlsName" -}}
{{ default (printf "%s.%s.svc" (include "pdserve.fullname" .) .Release.Namespace) .Values.tls.serverName }}
{{- end }}

{{- define "pdserve.tlsSecretName" -}}
{{- if eq .Values.tls.source "certManager" -}}
{{ include "pdserve.fullname" . }}-tls
{{- else -}}
{{ required "tls.secretName is empty, tls.source is secret" .Values.tls.secretName }}
{{- end }}
{{- end }}

{{- define "pdserve.tlsFlags" -}}
{{- if include "pdserve.hasTls" . }}
- --tls-cert-file=/etc/pdserve/tls/tls.crt
- --tls-key-file=/etc/pdserve/tls/tls.key
- --tls-ca-file=/etc/pdserve/tls/ca.crt
- --tls-server-name={{ include "pdserve.tlsName" . }}
{{- end }}
{{- end }}

{{- define "pdserve.tlsVolumes" -}}
{{- if include "pdserve.hasTls" . }}
- name: tls
  secret: {secretName: {{ include "pdserve.tlsSecretName" . | quote }}, defaultMode: 0440}
{{- end }}
{{- end }}

{{/* The folder, not its files: only a folder is brought up to date when the Secret changes. */}}
{{- define "pdserve.tlsMounts" -}}
{{- if include "pdserve.hasTls" . }}
- {name: tls, mountPath: /etc/pdserve/tls, readOnly: true}
{{- end }}
{{- end }}

{{/* Kubelet's gRPC probes cannot speak TLS: with it they ask the metrics port. Takes ctx, service and path. */}}
{{- define "pdserve.probe" -}}
{{- if include "pdserve.hasTls" .ctx.root -}}
httpGet: {port: metrics, path: {{ .path }}}
{{- else if .service -}}
grpc: {port: {{ .ctx.grpcPort }}, service: {{ .service }}}
{{- else -}}
grpc: {port: {{ .ctx.grpcPort }}}
{{- end }}
{{- end }}
